# One command per wish; each does its own set-up on a fresh machine (Python, make, a package index).
# PYTHON=/path/to/python3.12 make test   takes another interpreter for the first set-up.
PYTHON ?= python3
EXTRAS := test,xtb,dev,lab
VENV := .venv/bin
STAMP := .venv/installed-at
# The tests start several ranks at once: one thread each keeps them from fighting over the cores.
RUN := PATH="$(CURDIR)/$(VENV):$$PATH" OMP_NUM_THREADS=1
SHELL := bash
.DELETE_ON_ERROR:
.PHONY: help demo test chaos screenshots lab lint bench binder-check clean-notebooks clean FORCE

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

demo: $(STAMP) ## train on two ranks from the quickstart notebook and print what happened
	@$(RUN) python examples/run_quickstart.py

test: $(STAMP) ## run all tests and execute all notebooks (their trainings shortened)
	@$(RUN) python tests/browser/chromium.py
	@$(RUN) NVALCHEMI_FAST=1 python -m pytest --nbmake --nbmake-timeout=600 tests $(wildcard notebooks)

chaos: $(STAMP) ## the fault trials of launch() in full (NVALCHEMI_TRIALS=100 each) and their table
	@$(RUN) NVALCHEMI_TRIALS=$${NVALCHEMI_TRIALS:-100} python -m pytest -s tests/chaos

screenshots: $(STAMP) ## take the pictures in docs/images/ anew, by the tests in a browser
	@$(RUN) python tests/browser/chromium.py
	@$(RUN) NVALCHEMI_BROWSER=required NVALCHEMI_SCREENSHOTS=1 python -m pytest tests/browser

lab: $(STAMP) ## open JupyterLab on notebooks/ (LAB="--no-browser --port 8889" passes options on)
	@$(RUN) python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB) \
		$(or $(wildcard notebooks),.)

lint: $(STAMP) ## ruff (rules and format) and mypy
	@$(VENV)/ruff check --quiet .
	@$(VENV)/ruff format --quiet --check . || \
		{ echo "make lint: run '$(VENV)/ruff format .'" >&2; exit 1; }
	@$(VENV)/mypy --scripts-are-modules nvalchemi $(wildcard examples benchmarks)

bench: $(STAMP) ## run the benchmarks: ratios to peers and to what the machine can do
	@for script in benchmarks/*.py; do echo "$$script"; $(RUN) python "$$script" || exit 1; done

binder-check: ## carry out binder/'s steps in a fresh environment under a temporary folder
	@$(PYTHON) binder/check.py

clean-notebooks: $(STAMP) ## strip widget state and timing from the notebooks, keep their outputs
	@$(VENV)/python -m nbconvert --log-level=WARN --to notebook --inplace \
		--ClearMetadataPreprocessor.enabled=True \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask=kernelspec \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask=language_info \
		--ClearMetadataPreprocessor.preserve_nb_metadata_mask=title \
		--ClearMetadataPreprocessor.preserve_cell_metadata_mask=tags \
		notebooks/*.ipynb

clean: ## remove .venv and everything that was built
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamp holds this folder's path: a moved checkout gets a new environment, whose scripts do not
# point to the old place. It is written last: an install that failed leaves none, or an old one.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif
$(STAMP): pyproject.toml constraints.txt
	@if [ -e $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ]; then rm -r .venv; fi
	@if ! $(VENV)/python -c '' 2>/dev/null; then \
		$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null \
		|| { found=$$($(PYTHON) --version 2>&1 | tail -n 1); \
			echo "nvalchemi needs Python 3.11 to 3.14; '$(PYTHON)' is: $${found:-nothing}." \
				"Say, for example: make PYTHON=python3.12" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear .venv; \
	fi
	@echo "Installing into .venv (minutes the first time; the log is .venv/install.log)"
	@set -o pipefail; $(VENV)/python -m pip install --disable-pip-version-check \
		--progress-bar off --constraint constraints.txt --editable '.[$(EXTRAS)]' 2>&1 \
		| tee .venv/install.log \
		| awk '/^(Collecting|Processing)/ { printf "."; fflush() } \
			/^Installing collected/ { printf "\nunpacking %d packages\n", NF - 3; fflush() }' \
		|| { echo; tail -n 15 .venv/install.log; \
			echo "The install failed: see above. 'make' tries again." >&2; exit 1; }
	@echo "$(CURDIR)" > $(STAMP)

FORCE:
