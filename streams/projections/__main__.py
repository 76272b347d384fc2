"""`python -m odradek.streams.projections --bootstrap HOST:PORT --data DIR [--prefix P] [--snapshot FILE]`.

Runs the one worker until SIGTERM or SIGINT. `--config FILE` reads a whole KafkaConfig (JSON), for clusters with
security.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import faust
import msgspec

from odradek.streams.config import KafkaConfig
from odradek.streams.errors import StreamError
from odradek.streams.projections.app import create_app, ensure_changelogs


def main() -> int:
    """Exit code 1 when the broker cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m odradek.streams.projections", description=__doc__)
    parser.add_argument("--bootstrap", default="")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--config", type=Path, help="KafkaConfig as JSON, instead of the two above")
    parser.add_argument("--data", type=Path, required=True, help="folder for Faust's own files")
    parser.add_argument("--snapshot", type=Path, help="JSON file with the merged views, replaced every second")
    parser.add_argument("--loglevel", default="WARN")
    options = parser.parse_args()
    if options.config is not None:
        config = msgspec.json.decode(options.config.read_bytes(), type=KafkaConfig)
    elif options.bootstrap:
        config = KafkaConfig(bootstrap=options.bootstrap, prefix=options.prefix)
    else:
        parser.error("one of --bootstrap and --config is needed")
    try:
        asyncio.run(ensure_changelogs(config))
    except StreamError as error:
        print(error, file=sys.stderr)
        return 1
    options.data.mkdir(parents=True, exist_ok=True)
    app, _ = create_app(config, options.data, options.snapshot)
    faust.Worker(app, loglevel=options.loglevel, redirect_stdouts=False, quiet=True).execute_from_commandline()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
