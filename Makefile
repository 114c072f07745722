# Roadstead. The first two targets set everything up on a bare machine (Python 3.11, no GPU, no containers).
STEPS ?= 40
MAX_STALENESS ?= 2
SEED ?= 0
EXAMPLE ?= arithmetic
N ?= 3
CHAOS ?=

.PHONY: demo test slow unit integration chaos mutation long lint format setup clean help

help:            ## This list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

demo: setup      ## A small model learns by asynchronous RL; STEPS, MAX_STALENESS, SEED, EXAMPLE=arithmetic|guessing|calculator
	@.venv/bin/roadstead demo --example $(EXAMPLE) --steps $(STEPS) --max-staleness $(MAX_STALENESS) --seed $(SEED)

test: setup lint ## Lint, types, unit and integration tests on real servers
	.venv/bin/python -m pytest

slow: setup      ## Whole runs resumed, replayed and shown on real servers and a real browser, minutes
	.venv/bin/python -m pytest -m slow

unit: setup      ## Tests of pure parts, seconds
	.venv/bin/python -m pytest tests/unit

integration: setup ## Tests on real servers, minutes
	.venv/bin/python -m pytest tests/integration

chaos: setup     ## Seeded kills, hangs and faults on the real stack, checked from S3; N runs from SEED; CHAOS=options
	.venv/bin/python -m tests.chaos --runs $(N) --seed $(if $(filter command line,$(origin SEED)),$(SEED),20) $(CHAOS)

mutation: setup  ## The ledger's 66 mutants against its tests, 12 minutes
	.venv/bin/python -m pytest tests/unit/staleness/mutants.py -m mutation

long: setup      ## A run of STEPS steps (default 10000, hours): histories and memory stay flat
	.venv/bin/python -m tests.long --steps $(if $(filter command line,$(origin STEPS)),$(STEPS),10000)

lint: setup      ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup    ## Format in place
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

setup:           ## Make .venv from the lock file
	@scripts/setup

clean:           ## Remove the environment; data in .roadstead stays
	rm -rf .venv
