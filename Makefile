# The whole developer surface. Each target makes what it needs: the environment, Java, Kafka's jars, a browser.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# DEV=1: Python's development mode, which finds what is used from the wrong thread, and costs 2.7 times the CPU.
# Tests start hundreds of proxies: without bytecode each compiles all of its modules, for half a second of a core.
unexport PYTHONDONTWRITEBYTECODE
# The environment and the browser come over the network at the same time, and types are checked meanwhile.
MAKEFLAGS += --jobs=3
# Sets of names go through in an order of their own with each seed, simulations with them: one that failed is to fail again.
HASH_SEED = $(or $(PYTHONHASHSEED),0)
PYTEST = PYTHONHASHSEED=$(HASH_SEED) $(RUN)/python $(if $(DEV),-X dev) -m pytest
# The alarm of pytest-timeout raises in whatever runs, which asyncio takes for its task's own fault, and calls into C do
# not hear it. So a test that goes on for ever ends its worker, with the stacks of all threads, and fails by name.
NOT_FOR_EVER = -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

.PHONY: setup demo test collected test-quick test-stories test-clients test-bench test-matrix test-faults test-failovers \
    test-upgrade test-fuzz bench-look browser lint format lock clean

# The first target, so that `make` alone makes the environment.
$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("isthmus needs Python 3.11 or later, this is " + sys.version.split()[0] + ": set PYTHON=" if sys.version_info < (3, 11) else 0)'
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV) || \
	    { $(PYTHON) -m venv --without-pip $(VENV) && python3 -m pip --python $(RUN)/python install --quiet pip; }
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
	@echo 'isthmus is in $(RUN): export PATH="$$PWD/$(RUN):$$PATH"'

demo: $(VENV)/.ready  ## Two clusters, two proxies, one link: records at equal offsets, and none lost when the source is killed
	$(RUN)/isthmus demo

test: $(VENV)/.ready lint browser collected  ## Everything CI checks: of what stories are tried with one case, of files about a subject one, chosen by the tree
	$(PYTEST) $(NOT_FOR_EVER) -n 3 --dist loadfile --no-loadscope-reorder tests

# Once beside the linters, which leaves the bytecode of all tests, with their asserts rewritten, to three workers that
# would each make it: two thirds of what collecting costs.
collected: $(VENV)/.ready
	@found=$$($(PYTEST) --collect-only -qq tests) || { echo "$$found"; exit 1; }

test-quick: $(VENV)/.ready lint  ## Lint, types, unit tests and one real link, in under three minutes
	$(PYTEST) -n 2 --dist loadfile tests/unit \
	    tests/integration/test_links.py::test_records_are_the_same_in_everything_a_consumer_sees

# What takes longer than CI may. Each goes on where it was interrupted, as long as the tree is the same; SLICE=2/6 runs
# the second of six parts, AGAIN=1 begins anew.
SUITE = $(PYTEST) $(if $(AGAIN),--again) --slice $(or $(SLICE),1/1) --suite

test-stories: DEV = 1
test-stories: $(VENV)/.ready  ## Everything of what CI runs one of: kills, faults, ways around, files about one subject
	$(SUITE) stories -n 2 --dist loadfile tests

test-clients: $(VENV)/.ready  ## Clients against every version of brokers
	$(SUITE) clients -n 2 --dist loadfile tests

test-bench: $(VENV)/.ready  ## Every benchmark runs through; their figures mean nothing here
	$(SUITE) bench tests

test-matrix: $(VENV)/.ready  ## Equality over the full product of what a source's log can hold, and of broker versions
	ISTHMUS_MATRIX=full $(SUITE) matrix -n 2 tests/acceptance/test_equality_matrix.py

test-faults: DEV = 1
test-faults: $(VENV)/.ready  ## Random faults on real processes, ten minutes in each mode of links and trees (ISTHMUS_[SYNC_|TREE_]FAULTS_S, ISTHMUS_FAULTS_SEED)
	ISTHMUS_FAULTS_S=$${ISTHMUS_FAULTS_S:-600} ISTHMUS_FAULTS_SEED=$${ISTHMUS_FAULTS_SEED:-$$(date +%s)} \
	ISTHMUS_SYNC_FAULTS_S=$${ISTHMUS_SYNC_FAULTS_S:-600} ISTHMUS_LONG_CUT_S=$${ISTHMUS_LONG_CUT_S:-300} \
	ISTHMUS_TREE_FAULTS_S=$${ISTHMUS_TREE_FAULTS_S:-600} \
	    $(SUITE) all -s tests/faults

test-failovers: DEV = 1
test-failovers: $(VENV)/.ready  ## Twenty kills of an application's cluster (ISTHMUS_FAILOVERS), two hundred deaths of three brokers (ISTHMUS_STEPS[_CASES]), by ISTHMUS_SEED
	ISTHMUS_FAILOVERS=$${ISTHMUS_FAILOVERS:-20} ISTHMUS_STEPS=$${ISTHMUS_STEPS:-10} \
	ISTHMUS_STEPS_CASES=$${ISTHMUS_STEPS_CASES:-20} \
	    $(SUITE) failovers tests/acceptance/test_failover_application.py tests/acceptance/test_dies_in_steps.py

test-upgrade: $(VENV)/.ready  ## The version that tests/upgrade/FROM names beside this one, in every order, under traffic
	$(SUITE) upgrade -s tests/upgrade

test-fuzz: HASH_SEED = $(or $(PYTHONHASHSEED),$(shell date +%s))
test-fuzz: $(VENV)/.ready  ## Everything that is simulated, with hundreds of seeds (ISTHMUS_SIM_SEEDS, ISTHMUS_SIM_FIRST_SEED, PYTHONHASHSEED); properties with new examples; unit tests with seeds; requests made up by schemathesis and hypothesis (ISTHMUS_FUZZ_EXAMPLES); costly ones; listeners of running proxies, an hour (ISTHMUS_FUZZ_S, ISTHMUS_FUZZ_SEED)
	ISTHMUS_SIM_SEEDS=$${ISTHMUS_SIM_SEEDS:-300} ISTHMUS_FUZZ_EXAMPLES=$${ISTHMUS_FUZZ_EXAMPLES:-1000} \
	    $(SUITE) all -n 2 tests/sim tests/unit/proxy/test_admin_fuzz.py tests/unit/proxy/session/test_request_costs.py \
	    tests/unit/proxy/session/test_fuzz.py
	$(SUITE) all -n 2 -m hypothesis tests/unit
	$(SUITE) fuzz -n 2 tests/unit
	ISTHMUS_FUZZ_S=$${ISTHMUS_FUZZ_S:-3600} ISTHMUS_FUZZ_SEED=$${ISTHMUS_FUZZ_SEED:-$$(date +%s)} $(SUITE) all -s tests/fuzz

bench-look: $(VENV)/.ready  ## One short look at what a change costs, side by side with direct clients; the noise is printed
	$(RUN)/isthmus bench passthrough --quick
	$(RUN)/isthmus bench replicate --quick --no-mirror-maker
	$(RUN)/isthmus bench sync --scenario direct --scenario sync --scenario stretched-2 --load depth-1 --load open-500 \
	    --rounds 1

browser:  ## Chromium for the tests of report pages, by apt-get, where there is no browser and this is root
	@for each in chromium chromium-browser google-chrome google-chrome-stable; do \
	    command -v $$each >/dev/null && exit; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Chromium"; export DEBIAN_FRONTEND=noninteractive; \
	    apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; fi || \
	echo "Chromium could not be installed: tests of report pages will fail"

lint: $(VENV)/.ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports

format: $(VENV)/.ready
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

lock:  ## Pin every dependency with its hashes
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --no-emit-find-links --extra dev --extra embedded --extra spark pyproject.toml --output-file requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
