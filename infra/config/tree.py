"""The configuration tree: one frozen struct a section, one field a setting.

To add a setting, add a field here with a default and a docstring (meaning, unit, what none means): file, environment
(`ODRADEK_SECTION__KEY`), flags (`--set section.key=value`), `config show` and the checks for unknown keys all follow
from the types. A test holds that each field is documented. Secrets are typed `Secret`, so that they print as dots.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""Bounded above, because decisions on the log repeat settings and hold 64-bit integers."""
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
"""Bounded above, so that infinity is none: a wait of that length is a hang."""
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Part of topic names, object keys and actor names."""
LaneName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}-[023]$")]
"""A lane's trailing number is its partition; 1 is the evaluation lane's."""
Tenants = Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,62}(,[a-z0-9][a-z0-9-]{0,62})*)?$")]
"""Names, comma separated; each is the last part of its tenant's topics."""
Prefix = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$")]
"""What Kafka takes in front of a topic's name; may be empty."""

_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d{2}|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})"
_HOST_PORT = rf"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?):{_PORT}"
_URL = r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:" + _PORT + r")?(/\S*)?"
Address = Annotated[str, msgspec.Meta(pattern=f"^{_HOST_PORT}$", extra={"form": "host:port"})]
Addresses = Annotated[
    str, msgspec.Meta(pattern=f"^{_HOST_PORT}(,{_HOST_PORT})*$", extra={"form": "host:port, several comma separated"})
]
StoreUrl = Annotated[str, msgspec.Meta(pattern=f"^(aws|{_URL})$", extra={"form": "http(s)://host[:port], or aws"})]
Url = Annotated[str, msgspec.Meta(pattern=f"^{_URL}$", extra={"form": "http(s)://host[:port][/path]"})]
"""Addresses are checked by form when they are read: clients meet a wrong one late, and say so in words of their own.
`form` is what the refusal says was expected."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Data(Section, frozen=True, kw_only=True):
    """Where this machine keeps what it must keep."""

    dir: str = "~/.odradek/default"
    """Folder of the embedded services' data, state and logs. `--data` and ODRADEK_DATA set it too."""


class Kafka(Section, frozen=True, kw_only=True):
    """The log."""

    bootstrap: Addresses | None = None
    """host:port of the brokers, comma separated; none starts an embedded broker."""
    prefix: Prefix = ""
    """Deployment prefix of topics, groups and transactional ids; empty for none."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How to talk to the brokers."""
    ca_file: str | None = None
    """Certificate authority file for SSL; none takes the system's."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    """How to log in; none without SASL."""
    sasl_username: str | None = None
    """Login name; none without SASL."""
    sasl_password: Secret | None = None
    """Password; none without SASL. Better set in the environment than in a file."""
    replication: Count = 1
    """Copies of each partition of topics that are created. Production: 3."""
    min_insync: Count = 1
    """Copies that must have an append before it is acknowledged. Production: 2."""
    connect_timeout_s: Positive = 10.0
    """Seconds to reach a broker at start."""
    tenants: Tenants = ""
    """Other tenants, comma separated: each gets topics of its own, tasks.v1.TENANT and feedback.v1.TENANT. What is
    published there is that tenant's, whatever the message says; slots are shared fairly between tenants."""
    foreign_types: str = ""
    """Event types, comma separated, that no release of yours writes, or that you give up: readers pass over them. Every
    other type that a release does not know makes it stand still until one that knows it runs again."""

    @property
    def tenant_names(self) -> tuple[str, ...]:
        """`tenants`, one by one."""
        return tuple(name for name in self.tenants.split(",") if name)


class S3(Section, frozen=True, kw_only=True):
    """The object store."""

    endpoint: StoreUrl | None = None
    """URL of the service, or `aws` for the provider's own; none starts an embedded store."""
    bucket: str = "odradek"
    """Bucket of blobs and checkpoints. It must exist unless the store is embedded."""
    region: str = "us-east-1"
    """Region in signatures."""
    credentials_file: str | None = None
    """JSON file with access_key and secret_key; none uses the usual AWS chain (environment, profile, role)."""


class Privacy(Section, frozen=True, kw_only=True):
    """The keys of subjects: whose content lies encrypted on the log and in the object store."""

    keys: str | None = None
    """Folder of the keys; none takes `keys` in the data folder. All hosts of a deployment must share it. Back it up
    apart from everything else: a copy that outlives an erasure undoes it."""
    kms_key: str | None = None
    """Id, ARN or alias of an AWS KMS key that wraps the keys; none stores them as they are."""
    kms_region: str = "us-east-1"
    """Region of that KMS key."""


class Ray(Section, frozen=True, kw_only=True):
    """Where actors run."""

    address: Address | None = None
    """host:port of a cluster's head; none starts an embedded one."""
    logical_cpus: Count = 16
    """Places for actors on the embedded node; a number to count against, not cores."""


class Telemetry(Section, frozen=True, kw_only=True):
    """What is told to whom about a run."""

    otlp_endpoint: Url | None = None
    """Base URL of an OTLP/HTTP collector; none exports no traces."""
    prometheus_port: Port | None = None
    """Loopback port of the metrics page; none takes a free one."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""


class Policy(Section, frozen=True, kw_only=True):
    """The model that is trained and served."""

    dir: str | None = None
    """Policy directory: config.json, safetensors, tokenizer.json; `odradek policy import` makes one of any Hugging Face
    Llama, Qwen3 or Qwen3-MoE checkpoint. None is the shipped demo policy. On a cluster: the same path on every host."""
    max_context: Count | None = None
    """Tokens that one session may have; none takes all positions of the model, as far as inference.kv_memory_mb holds
    them."""


class Lane(Section, frozen=True, kw_only=True):
    """How batches are made; written to the log as `lane.configured`."""

    policy: Name = "demo"
    """Id of the policy that it trains."""
    name: LaneName = "main-0"
    """The lane of RL groups. A branch (`odradek train --from`) has one of its own, ending in -2 or -3."""
    groups_per_batch: Count = 8
    """Kept groups that close a batch."""
    attempts: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 8
    """Sessions of one group, which run at the same time: at most session.max_in_flight. Fewer than about 4 leave few
    groups with any spread."""
    max_staleness: NonNegative = 2
    """Versions that a token may lie behind the version that trains it; older tokens are masked."""
    advantage: Literal["dr_grpo", "grpo", "rloo"] = "dr_grpo"
    """Baseline within a group."""
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """What the importance ratio is taken against."""
    token_budget: Count = 6000
    """Tokens of one packed micro-batch."""
    spread_component: Name = "solved"
    """A group is kept only if this component of the reward differs inside it."""


class Trainer(Section, frozen=True, kw_only=True):
    """The training step."""

    learning_rate: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 6e-4
    """Step size of AdamW. 0 trains nothing: the control run of the demo."""
    minibatches: Count = 2
    """Optimiser steps a batch; 1 is strictly on-policy."""
    micro_tokens: Count | None = None
    """Tokens of one forward and backward: bounds memory, and touches the result by rounding only. None takes what keeps
    it near 2 GB, at most 8192."""
    router_replay: bool = True
    """Whether a mixture of experts is trained through the experts that sampled. A dense policy has none."""
    embedding_lr_scale: Positive | None = None
    """Factor on the embedding's learning rate. None: what the policy's config.json says under this name, else 1."""
    clip_low: Positive = 0.2
    """The ratio's gradient ends below 1 - this."""
    clip_high: Positive = 0.28
    """The ratio's gradient ends above 1 + this."""
    kl_coefficient: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    """Weight of the KL term against the warm start; 0 computes none."""
    surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """The objective: a clipped ratio a token (PPO, GRPO, DAPO), a sequence (GSPO; clips of 3e-4 and 4e-4), a clipped
    weight (CISPO), or the plain policy gradient."""
    aggregation: Literal["constant", "sequence_mean", "token_mean"] = "constant"
    """How tokens' losses add up: by a constant (Dr. GRPO), the mean in each sequence (GRPO), over all tokens (DAPO)."""
    keep_versions: NonNegative = 50
    """Newest weight versions that stay in the object store; 0 keeps all. Versions that are served, pinned, rolled back
    to or named by work under way stay too. `odradek restore`, `audit resample` and `eval` need the ones they name."""
    keep_every: NonNegative = 50
    """Each version that this number divides stays as well; 0 for none."""


class Inference(Section, frozen=True, kw_only=True):
    """The engines that sample."""

    replicas: Count = 1
    """Inference actors, one engine each."""
    max_running: Count = 128
    """Requests that one engine decodes together."""
    kv_memory_mb: Count = 1024
    """Most memory of one engine for keys and values, MB. Too little holds few sessions, and short ones."""
    kv_on_reload: Literal["recompute", "keep"] = "recompute"
    """What happens to keys and values of older weights."""


class Session(Section, frozen=True, kw_only=True):
    """The agents at work."""

    actors: Count = 2
    """Session actors; each hosts many sessions."""
    max_in_flight: Count = 104
    """Sessions at once. Too few leave the engine's batch empty, too many make rollouts stale."""
    condense: Literal["off", "model", "digest"] = "off"
    """What happens when a session's context fills: it ends, the model sums up what it knows and goes on (a digest of
    its calls where it can't), or it goes on from the harness's digest. The demo's policy never learned to sum up."""
    condense_at: Fraction = 0.8
    """Share of the context above which it is condensed. The rest is the room of the summary and of a last turn."""


class Reward(Section, frozen=True, kw_only=True):
    """The graders."""

    actors: Count = 1
    """Reward actors."""


class Dlq(Section, frozen=True, kw_only=True):
    """Records that a consumer could not handle."""

    later: Literal["wait", "go_on"] = "wait"
    """What later records of such a record's key do: `wait` behind it until it is released or dropped, or `go_on`."""


class Projections(Section, frozen=True, kw_only=True):
    """Live tables kept by a Faust worker."""

    enabled: bool = True
    """Whether the worker runs beside the actors. It costs up to a tenth of a core under the demo's load."""


class Audit(Section, frozen=True, kw_only=True):
    """Tamper evidence: the notary, which signs what the log holds."""

    enabled: bool = True
    """Whether a notary runs beside the actors."""
    interval_records: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """Records of a partition after which they are anchored."""
    interval_s: Positive = 60.0
    """Seconds after which whatever there is is anchored; younger records can still be changed unseen."""
    key_file: str | None = None
    """PEM file of the Ed25519 key that signs, made at the first start; none is audit/notary.key in the data folder."""
    bucket: str | None = None
    """Bucket of signed rounds, made with object lock if it does not exist; none is s3.bucket with -audit behind it."""
    name: Name | None = None
    """Under which rounds are kept; none takes kafka.prefix. Another name begins another chain, over the log as it then
    is; so does `odradek restore`, for a log that was restored to an earlier moment."""
    lock_mode: Literal["governance", "compliance"] = "governance"
    """Object lock: governance can be lifted by who has that permission, compliance by nobody."""
    lock_days: Count = 365
    """Days that a round can't be deleted."""


class Sandbox(Section, frozen=True, kw_only=True):
    """Where commands run."""

    max_commands: Count | None = None
    """Commands that run at once on one host; none takes two a core."""
    max_live: Count = 1000
    """Sandboxes at once."""
    min_free_disk_mb: NonNegative = 512
    """Free disk below which no sandbox is made, MB."""
    min_free_memory_mb: NonNegative = 256
    """Free memory below which no sandbox is made, MB."""


class Demo(Section, frozen=True, kw_only=True):
    """Sizes of `make demo`."""

    seed: NonNegative = 0
    """Seed of tasks and sampling."""
    minutes: Positive = 8.0
    """Length of the training window, minutes."""
    steps: NonNegative = 0
    """Training steps that end the window before its time; 0 for none. Makes runs comparable between machines."""
    new_combinations: NonNegative = 120
    """Held-out tasks of new combinations that the first and last version are evaluated on."""
    unseen_identifiers: NonNegative = 40
    """Held-out tasks with identifiers never seen."""
    unseen_templates: NonNegative = 40
    """Held-out tasks from function templates never seen."""
    greedy: bool = False
    """Evaluate greedily as well as sampled."""


class Config(Section, frozen=True, kw_only=True):
    """Everything."""

    data: Data = Data()
    kafka: Kafka = Kafka()
    s3: S3 = S3()
    privacy: Privacy = Privacy()
    ray: Ray = Ray()
    telemetry: Telemetry = Telemetry()
    policy: Policy = Policy()
    lane: Lane = Lane()
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    session: Session = Session()
    reward: Reward = Reward()
    dlq: Dlq = Dlq()
    projections: Projections = Projections()
    audit: Audit = Audit()
    sandbox: Sandbox = Sandbox()
    demo: Demo = Demo()
