#!/bin/sh
# Looks at this machine before anything is downloaded. Usage: infra/preflight.sh [--install]
# Needs only a POSIX shell, so that even a machine without Python gets an answer.
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != "Linux" ]; then
    echo "preflight: Linux only: the sandboxes are made of Linux namespaces, and this is $(uname -s)" >&2
    exit 3
fi

for candidate in ${PYTHON:-python3.11 python3}; do
    if found=$(command -v "$candidate"); then
        exec "$found" infra/preflight.py "$@"
    fi
done

if [ "${1:-}" = "--install" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq python3.11 python3.11-venv >&2
    exec python3.11 infra/preflight.py "$@"
fi
echo "preflight: no ${PYTHON:-python3.11} here: install the Debian packages python3.11 and python3.11-venv" >&2
exit 3
