"""Where the log is: plain frozen settings that the caller fills; this room reads no file and no environment."""

import ssl

import msgspec

REQUEST_TIMEOUT_S = 30.0
"""Seconds that one request or acknowledged append may take. Too low: a broker's garbage collection or leader change
looks like an outage. Too high: a dead broker is noticed late."""

CONNECT_TIMEOUT_S = 10.0
"""Seconds to reach a broker at start. Too low: a broker still starting is refused. Too high: a wrong address hangs."""


class KeyStoreAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where subjects' keys lie (`streams/privacy`)."""

    folder: str = ""
    """Empty: there is no key store, and content is written as it is."""
    kms_key: str = ""
    """Id, ARN or alias of the KMS key that wraps the keys; empty: they are stored as they are."""
    kms_region: str = ""


class KafkaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address, deployment prefix and security of one Kafka cluster."""

    bootstrap: str
    """host:port, comma separated."""
    prefix: str = ""
    """Deployment prefix: topics, groups and transactional ids become PREFIX.NAME; empty for none. A final dot in it
    is the separator itself."""
    security_protocol: str = "PLAINTEXT"
    """PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL."""
    ca_file: str = ""
    """Certificate authority file for SSL; empty for the system's."""
    sasl_mechanism: str = ""
    """PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512; empty without SASL."""
    sasl_username: str = ""
    sasl_password: str = ""
    replication: int = 1
    """Copies of each partition (production: 3)."""
    min_insync: int = 1
    """Copies that must have an append before it is acknowledged (production: 2)."""
    request_timeout_s: float = REQUEST_TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    foreign_types: tuple[str, ...] = ()
    """Event types that no release of this deployment writes: read as undecodable, where any other unknown type makes
    readers stand still."""

    def name(self, bare: str) -> str:
        """A topic, group or transactional id as this deployment calls it."""
        return f"{self._stem}{bare}"

    def bare(self, name: str) -> str:
        """The name without the deployment prefix."""
        return name.removeprefix(self._stem)

    @property
    def _stem(self) -> str:
        return f"{self.prefix.rstrip('.')}." if self.prefix else ""

    def client_options(self) -> dict[str, object]:
        """Keyword arguments that every aiokafka client of this configuration takes."""
        options: dict[str, object] = {
            "bootstrap_servers": self.bootstrap.split(","),
            "request_timeout_ms": int(self.request_timeout_s * 1000),
            "security_protocol": self.security_protocol,
        }
        if self.security_protocol.endswith("SSL"):
            options["ssl_context"] = ssl.create_default_context(cafile=self.ca_file or None)
        if self.security_protocol.startswith("SASL"):
            options["sasl_mechanism"] = self.sasl_mechanism
            options["sasl_plain_username"] = self.sasl_username
            options["sasl_plain_password"] = self.sasl_password
        return options

    def __repr__(self) -> str:  # the password must never reach a log line
        return f"KafkaConfig({self.bootstrap!r}, prefix={self.prefix!r}, {self.security_protocol})"
