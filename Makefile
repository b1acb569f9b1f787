# The environment; remove the folder to start afresh.
VENV ?= .venv
# The Python to make it with, by default the newest usable one on the PATH.
PYTHON ?= $(shell \
  if [ -f $(VENV)/bootstrap.stamp ] && [ -x $(VENV)/bin/python ]; then \
    echo $(VENV)/bin/python; exit; \
  fi; \
  for python in python3.13 python3.12 python3.11; do \
    $$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && exit; \
  done; \
  echo python3)

# The one with the compilers of other devices, which are large.
AOT_VENV ?= .venv-aot
AOT_REQUIREMENTS = requirements-aot.txt

# A uv to install with, in place of pip: make UV=uv TARGET.
UV ?=

BOOTSTRAP = @$(PYTHON) bootstrap.py --venv $(VENV) $(UV:%=--uv=%)
RUN = $(VENV)/bin/python -m
BOOTSTRAP_AOT = @$(PYTHON) bootstrap.py --venv $(AOT_VENV) $(UV:%=--uv=%) \
  --requirements $(AOT_REQUIREMENTS)
AOT = $(AOT_VENV)/bin/python -m experiments.aot

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: aot aot-ci aot-gpu demo docs help lint peers test \
  test-ci test-core wheel-test

# Files stay together, as their tests share programs.
PYTEST = $(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 1 \
  --durations 25
# Programs as users have them, see tests/conftest.py.
OPTIMISED = JAX_DISABLE_MOST_OPTIMIZATIONS=0 XLA_FLAGS=
# Only those that have the mark, as all others would be imported, too.
files_of = $(shell grep -l 'mark\.$1\b' tests/*_test.py)
# What depends most on JAX's version: models, kernels, caches, decoding.
CORE = cache forced_draft kernels kv_commit models prompt_lookup \
  quantized_matmul sampling swiglu tree tree_attention tree_match \
  verify

demo: ## the demonstration with a small model, or another built-in one as MODEL
	$(BOOTSTRAP) experiments
	@$(RUN) swiftspec_jax.cli.demo $(if $(MODEL),--target=$(MODEL))

test: ## the tests that need no network once the models are cached
	$(BOOTSTRAP) experiments serve test
	$(PYTEST)

test-ci: ## the tests that take long or need all optimisations of XLA
	$(BOOTSTRAP) experiments serve test
	$(PYTEST) -m ci $(call files_of,ci)
	$(OPTIMISED) $(PYTEST) -m optimised $(call files_of,optimised)

test-core: ## those of decoding; PYTHON and VENV name other versions
	$(BOOTSTRAP) experiments serve test
	$(OPTIMISED) $(PYTEST) $(CORE:%=tests/%_test.py)

lint: ## style and types: ruff check, ruff format, mypy on the public API
	$(BOOTSTRAP) experiments serve test
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

docs: ## the site, into build/site; a broken link is an error
	$(BOOTSTRAP) docs
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

peers: ## the live comparison with transformers and llama.cpp, installs torch
	$(BOOTSTRAP) experiments peers serve test
	$(PYTEST) -m 'peers and not gemma' $(call files_of,peers)

wheel-test: ## build the wheel, install it elsewhere and decode with it
	$(BOOTSTRAP) experiments test
	.ci/wheel-test $(VENV)/bin/python

aot: ## compile all kernels and the steps of all pairs for TPUs and GPUs: hours
	$(BOOTSTRAP_AOT)
	$(AOT) --suite=kernels --suite=builtin --suite=large --suite=targets \
	  --resume --output=build/aot

aot-ci: ## the same for some shapes, the steps of one TPU and one GPU: minutes
	$(BOOTSTRAP_AOT)
	$(AOT) --suite=kernels --every=60 --output=build/aot-ci/kernels
	$(AOT) --suite=tiny --target=v5e --target=h200 --output=build/aot-ci/tiny

aot-gpu: override AOT_VENV := $(AOT_VENV)-gpu
aot-gpu: AOT_REQUIREMENTS = requirements-aot-gpu.txt
aot-gpu: ## each kernel once and the steps of one GPU, with the JAX of its hosts
	$(BOOTSTRAP_AOT)
	$(AOT) --suite=kernels --suite=tiny --every=1000 --target=h200 \
	  --output=build/aot-gpu

help: ## this list
	@sed -n 's/^\([a-z-]*\): ## /\1\t/p' Makefile | expand -t 12
