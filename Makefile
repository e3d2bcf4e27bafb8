# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PY := .venv/bin/python
STAMP := .venv/.setup-stamp

.PHONY: demo test fast check mutations bench setup debian clean
.DEFAULT_GOAL := check

setup: $(STAMP)

$(STAMP): requirements.lock requirements-guest.lock requirements-models.lock pyproject.toml interlock/pyproject.toml \
		deploy/setup/debian.sh deploy/setup/environment.sh deploy/setup/guest.sh
	@echo "== set-up (once): system packages, then .venv, then .venv-guest (torch) =="
	@bash deploy/setup/debian.sh
	@bash deploy/setup/environment.sh
	@bash deploy/setup/guest.sh
	@touch $(STAMP)

demo: setup
	@$(PY) -I examples/demo/demo.py

test: setup check
	@$(PY) -I deploy/setup/run_tests.py

fast: setup
	@$(PY) -m pytest -m "not root and not browser and not postgres and not guest and not demo and not mutation" -n 2 tests

check: setup
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache
	@$(PY) -m pytest tests/test_architecture.py

mutations: setup
	@INTERLOCK_ALL_MUTATIONS=1 $(PY) -m pytest -m mutation -n 2 tests/mutations

bench: setup
	@test -n "$(NAME)" || { echo "usage: make bench NAME=<file in bench/>"; exit 2; }
	@$(PY) -I bench/$(NAME).py

clean:
	rm -rf .venv .venv-guest build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache
