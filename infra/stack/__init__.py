"""The embedded stack: Apache Kafka, SeaweedFS (S3) and Ray on one machine's loopback, without Docker.

Use `odradek.infra.stack.stack.Stack`; tests use the fixtures of `odradek.infra.stack.testing`.
"""
