# Two commands, each of which does all of its own set-up in .venv on a machine with Python >= 3.10 and make:
#
#   make demo   train a small text-to-image model for a few minutes and see it get better: runs/demo/before_after.png
#   make test   lint, types, all tests, and >= 95 % line coverage of flowalign/core and flowalign/algorithms

PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check

.PHONY: demo test

demo: .venv/installed
	.venv/bin/flowalign demo

test: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest --cov

# A stamp is newer than what it was installed from, so that a second run starts at once.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	@echo "Installing flowalign and its dependencies into .venv: a few minutes, once"
	$(PIP) --editable .
	@touch $@

.venv/installed-dev: pyproject.toml | .venv/bin/python
	@echo "Installing flowalign, its dependencies and the test tools into .venv: a few minutes, once"
	$(PIP) --editable '.[dev]'
	@touch .venv/installed $@
