# Works in .venv and needs only python3 (with venv), gcc with the C library's headers, and make. A second run is instant.
.PHONY: setup llamacpp web demo test check format soak clean

VENV   := .venv
PYTHON := $(VENV)/bin/python
STAMP  := $(VENV)/.ready
PIP    := $(PYTHON) -m pip install --quiet --constraint constraints.txt
# Where PyTorch's CPU build is, for those whose pip would take the CUDA build (PyPI's, gigabytes) instead.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt perilune/kernels/build.py $(wildcard perilune/kernels/*.c perilune/kernels/*.h)
	@# Without python3-venv the first try leaves a .venv that has no pip; that one is made anew.
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || python3 -m venv --clear $(VENV)
	@# pip is asked first what it would install: CUDA shows by NVIDIA's packages.
	@echo "PyTorch's CPU build, then the rest: a few minutes of downloads"
	@if $(PIP) --dry-run --ignore-installed --report - torch | grep -qi '"name": *"nvidia'; \
	then $(PIP) --extra-index-url $(TORCH_INDEX) torch; else $(PIP) torch; fi
	$(PIP) --editable '.[dev]'
	$(PYTHON) -m perilune.kernels.build
	touch $(STAMP)

# The other model runtime (docs/mri.md). Built without OpenMP: a process bears one such runtime, and torch has it.
llamacpp: setup
	CMAKE_ARGS="-DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF" $(PIP) --editable '.[llamacpp]'

# The chat page: web/ becomes perilune/web/dist, which is committed, so that nobody needs Node to run it. Node comes with the
# dev extras.
web: setup
	cd web && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund
	cd web && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" npm run --silent check && PATH="$(CURDIR)/$(VENV)/bin:$$PATH" npm run --silent build

# One process more than CI's cores: tests of servers mostly wait.
test: setup
	$(PYTHON) -m pytest -m 'not soak' --numprocesses 3 --dist loadfile --no-loadscope-reorder

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTHON) -m pytest tests/test_house.py

format: setup
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Ten minutes of mixed load with kill -9 (tests/e2e/test_soak.py), then 20,000 requests to one server whose memory
# must not grow; that result is kept with its date.
soak: setup
	$(PYTHON) -m pytest -m soak --timeout 7200
	$(PYTHON) -m bench.soak --json docs/soak/$$(date +%F).json
	$(PYTHON) -m bench.gateway --requests 100000 --json docs/soak/gateway-$$(date +%F).json

demo: setup
	$(PYTHON) -m perilune.cli.demo

clean:
	rm -rf $(VENV) build *.egg-info perilune/kernels/*.so
