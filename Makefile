# Everything a fresh clone needs: Python ≥ 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
EXAMPLES ?= every-change

# kept whatever the environment says: every process that a test or a run starts would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install tools run test test-all check docs site figures format bench bench-conv bench-cifar10 image-replay clean

# what running needs
install: $(VENV)/.installed $(VENV)/.warm

$(VENV)/.installed: pyproject.toml
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON): no such command here. daskcnn needs Python 3.11 or newer; give one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "daskcnn needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@# a fifth of the disk space is for bytecode that is never run; setuptools, which Python 3.11 brings, is not needed
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dashboard]'
	@$(BIN)/python -m pip uninstall --quiet --yes setuptools
	@touch $@

# apart from what is installed: `make -j2 tools` compiles while pip fetches
$(VENV)/.warm: $(VENV)/.installed
	$(BIN)/daskcnn doctor --warm
	@touch $@

# what tests and checks need besides
tools: $(VENV)/.warm $(VENV)/.tools

$(VENV)/.tools: $(VENV)/.installed
	@# bytecode is compiled for what is imported alone: for all of it takes as long as the rest of installing
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	@touch $@

run: install
	$(BIN)/python -m daskcnn.run $(ARGS)

# `each COMMAND` runs it whether or not one before it has failed; `exit $$worst` ends with the worst of their codes.
EACH := worst=0; trap 'exit 130' INT; each() { echo "$$*"; "$$@" || { code=$$?; [ $$code -le $$worst ] || worst=$$code; }; }

# Files with tests of a cluster: to look for these in all others takes as long as ten of them.
CLUSTER_TESTS = $$(grep -rl --include='test_*.py' 'mark\.cluster' tests)

# Without a cluster as many tests run at once as there are cores. Tests of a cluster mostly wait for processes: two files
# of them run at once (those of one file share their clusters), and the others fill in what they leave of the cores.
# Their output comes behind that of the others.
test: tools
ifeq ($(ARGS),)
	@$(EACH); clusters=$$(mktemp); \
	$(BIN)/python -m pytest -m "cluster and not slow" --numprocesses 2 --dist loadfile $(CLUSTER_TESTS) >$$clusters 2>&1 & \
	trap "kill $$! 2>/dev/null; cat $$clusters; rm $$clusters; exit 130" INT TERM; \
	each nice $(BIN)/python -m pytest -q -m "not cluster and not slow" --hypothesis-profile $(EXAMPLES) \
	  --numprocesses auto --dist worksteal; \
	wait $$! || { code=$$?; [ $$code -le $$worst ] || worst=$$code; }; \
	cat $$clusters; rm $$clusters; exit $$worst
else
	$(BIN)/python -m pytest $(ARGS)
endif

# what a change is tried with before it is done: also what takes long
test-all: tools
	@$(EACH); \
	each $(MAKE) --no-print-directory test EXAMPLES=thorough; \
	each $(BIN)/python -m pip install --quiet --group test-s3; \
	each $(BIN)/python -m pip install --quiet --group test-mlflow; \
	each $(BIN)/python -m pip install --quiet --group test-optuna; \
	each $(BIN)/python -m pytest -q -m "slow and not cluster" --hypothesis-profile thorough \
	  --numprocesses auto --dist worksteal; \
	each $(BIN)/python -m pytest -m "slow and cluster" --numprocesses 2 --dist loadfile $(CLUSTER_TESTS); \
	exit $$worst

check: tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@for script in docs/generate_*.py; do $(BIN)/python $$script --check || exit 1; done

# the documentation site, in build/site: the pages that are made of the package's own models, then all of them
docs: $(VENV)/.docs
	@for script in docs/generate_*.py; do $(BIN)/python $$script || exit 1; done
	@$(MAKE) --no-print-directory site
	@echo "open build/site/index.html, or for the search: $(BIN)/python -m http.server --directory build/site"

# of the pages as they are
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.tools
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[docs]'
	@touch $@

# the drawings of docs/concepts, in docs/pictures
figures: tools
	$(BIN)/python docs/figures/draw_all.py

format: tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks.conv_gemm
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.loader

bench-conv: install
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  { echo "bench-conv compares with PyTorch, which is missing here. Try: $(BIN)/python -m pip install 'daskcnn[bench]'"; exit 1; }
	@failed=0; for script in conv_vs_torch step_vs_torch "step_vs_torch --scaling"; do \
	  $(BIN)/python -m benchmarks.$$script $(ARGS) || failed=1; echo; done; exit $$failed

bench-cifar10: install
	$(BIN)/python -m benchmarks.cifar10 $(ARGS)

# the image's install steps and a job, without a container engine
image-replay:
	$(PYTHON) deploy/replay_image.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
