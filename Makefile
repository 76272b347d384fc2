# `make` alone prints this help. Everything works from a fresh clone: what is missing is set up first.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
INSTALLED := $(VENV)/installed
ROOMS := streams kernels actors infra
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup demo bench-demo test test-slow crash check lint types layers fix up down status dashboard lock

help: ## Print this help.
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(INSTALLED) ## Check the machine, then install everything into .venv (5.8 GB).

$(INSTALLED): requirements.lock pyproject.toml infra/stack/kafka-jars.lock
	@PYTHON="$(PYTHON)" sh infra/preflight.sh --install
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q 'uv>=0.8'
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps -e .
	$(BIN)/python -m odradek.infra.stack.jars
	@touch $(INSTALLED)

demo: $(INSTALLED) ## Watch a coding agent get better, on this machine, in 12 minutes.
	@$(BIN)/odradek demo

bench-demo: $(INSTALLED) ## The demo with greedy evaluation, larger sets and three seeds.
	@$(BIN)/odradek demo --bench

test: $(INSTALLED) ## All tests but the slow ones and those for a GPU.
	@$(BIN)/pytest -q -m "not slow and not gpu" $(ARGS)

test-slow: $(INSTALLED) ## The slow ones: a person's run, 200 damaged places in stored segments, unprivileged sandboxes.
	@$(BIN)/pytest -q -m "slow and not gpu" $(ARGS)

crash: $(INSTALLED) ## N seeded faults into a running job, then every guarantee checked: make crash N=50 SEED=1
	@cd tests && exec ../$(BIN)/python -m support.crash --faults $(or $(N),50) --seed $(or $(SEED),1) \
		--report $(or $(REPORT),/tmp/odradek-crash-$(or $(N),50)-$(or $(SEED),1).md)

check: lint types layers ## Lint, types, layers: what CI checks before it tests.

lint: $(INSTALLED)
	@$(BIN)/ruff check .

types: $(INSTALLED)
	@MYPYPATH=src $(BIN)/mypy --strict $(foreach room,$(ROOMS),-p odradek.$(room))

layers: $(INSTALLED)
	@$(BIN)/lint-imports

fix: $(INSTALLED) ## Let ruff repair and format what it can.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

up: $(INSTALLED) ## Start Kafka, S3, Ray and the actors, on loopback.
	@$(BIN)/odradek up

down: $(INSTALLED) ## Stop them. Data stays.
	@$(BIN)/odradek down

status: $(INSTALLED) ## How they stand.
	@$(BIN)/odradek status

dashboard: $(INSTALLED) ## Open traces and curves of the last run in MLflow.
	@$(BIN)/odradek dashboard

lock: $(INSTALLED) ## Resolve Python packages and jars again, and rewrite both locks.
	$(BIN)/uv pip compile --python-version 3.11 --no-emit-index-url --generate-hashes --extra java --extra dev \
		pyproject.toml -o requirements.lock
	$(BIN)/python -m odradek.infra.stack.jars relock
