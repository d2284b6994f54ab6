# make test and make compare start from nothing but Python 3.11+ and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
# Another version, or the path of a wheel.
TORCH ?= torch==2.13.0
# More options for every pip install, such as --find-links FOLDER.
PIP_ARGS ?=
# 1: install torch's CUDA build even without a GPU.
ALLOW_CUDA ?= $(if $(shell command -v nvidia-smi),1,0)
# More options for pytest, mobius-ds compare or comparisons/paper.py.
ARGS ?=

REQUIREMENTS := requirements/build.txt requirements/lock.txt
PIP = $(VENV)/bin/python -m pip install --quiet $(PIP_ARGS)

# DeepSpeed looks for ninja on the PATH. Its operators are compiled into the venv: in the shared default folder, a
# lock file left by a killed job would make every later one wait forever, in silence.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
# Several ranks share the cores: more threads in each only get in each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: test chaos soak compare paper venv unlock clean

test: venv unlock
	@echo "Tests: about a quarter of an hour on 2 cores; a dot is a test that passed."
	@$(VENV)/bin/python -m pytest -q -n 2 --dist worksteal $(ARGS)

# Nightly: 200 seeds of random delays on every example model, and 2,000 steps with evaluation and checkpoints.
chaos: venv unlock
	$(VENV)/bin/python -m pytest -q -n 2 tests/runtime/sweeps/test_chaos.py tests/runtime/sweeps/test_delays.py --seeds 200 $(ARGS)

soak: venv unlock
	$(VENV)/bin/python -m pytest -q tests/runtime/engine/test_soak.py --soak-steps 2000 $(ARGS)

compare: venv unlock
	$(VENV)/bin/mobius-ds compare $(ARGS)

paper: venv
	$(VENV)/bin/python comparisons/paper.py $(ARGS)

venv: $(VENV)/operators.stamp

unlock: venv
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete

$(VENV)/packages.stamp: $(REQUIREMENTS) setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("mobius_ds needs Python 3.11 or newer: make PYTHON=...")'
	@echo "Making a virtual environment in $(VENV)."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing what the packages are built with."
	@$(PIP) -r requirements/build.txt
ifneq ($(ALLOW_CUDA),1)
	@$(PIP) --dry-run --no-deps --ignore-installed --report $(VENV)/torch.json $(TORCH)
	@$(VENV)/bin/python requirements/check_torch.py $(VENV)/torch.json
endif
	@echo "Installing $(TORCH); its download is the largest, some hundred megabytes."
	@$(PIP) $(TORCH)
	@echo "Installing DeepSpeed and the other packages of requirements/lock.txt."
	@$(PIP) --no-build-isolation -r requirements/lock.txt
	@echo "Installing mobius_ds."
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/operators.stamp: $(VENV)/packages.stamp
	@rm -rf $(TORCH_EXTENSIONS_DIR)
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@$(VENV)/bin/python requirements/build_ops.py
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
