# Everything happens in .venv, which each command sets up by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell find shmsync native/include native/src native/bind native/CMakeLists.txt examples -type f -not -name '*.pyc' -not -name _native.pyi) pyproject.toml README.md tools/readme_elsewhere.py

# Compiled tests are kept, whatever the environment says: else each process of a test run compiles them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-device test-failpoints test-gpu test-torchrl-0.13 test-upstream planted-faults storm fuzz lint types native-test sanitize model litmus bench wheel docs clean

demo: $(STAMP)
	$(BIN)/shmsync demo $(ARGS)

# From /: the tests run against the installed package, and a top-level shmsync/ would shadow it.
# All of tests/, or a part: make test TESTS=tests/engine/death/test_fork.py ARGS="-k child"
TESTS ?= tests
JOBS ?= auto
PYTEST = cd / && $(abspath $(BIN))/python -m pytest -c $(abspath pyproject.toml) --rootdir $(abspath .)

test: $(STAMP)
	$(PYTEST) -n $(JOBS) $(addprefix $(abspath .)/,$(TESTS)) $(ARGS)

# And what takes longer: trainings, storms, benchmarks, a simulated device, failpoints, the oldest TorchRL.
test-all: test
	$(PYTEST) -n $(JOBS) -m slow $(abspath tests)
	$(MAKE) test-device
	$(MAKE) test-failpoints CHOICE=all
	$(MAKE) test-torchrl-0.13

# A set of faults, each planted in a copy: do tests find it? ARGS="engine/write" takes some (tools/planted_faults.py).
planted-faults: $(STAMP)
	$(BIN)/python tools/planted_faults.py $(ARGS)

# The engine's process tests once more, with every arena and every new tensor on a device without hardware
# (support/devices/simulated.py), or with DEVICE=cuda on the first GPU. Then, with modules in the host's memory, schemes
# in shared memory and the collector.
DEVICE ?= simulated
SCHEMES_ON_DEVICES := $(wildcard $(addprefix tests/conformance/,\
  $(addprefix sends/test_,cast.py partial.py receive.py send.py) \
  $(addprefix trouble/test_,death.py own_loop.py messages.py threads.py)))
test-device: $(STAMP)
	export SHMSYNC_TEST_DEVICE=$(DEVICE) && $(PYTEST) -n $(JOBS) $(abspath tests/engine tests/unit/source/test_layouts.py) $(ARGS)
	export SHMSYNC_TEST_DEVICE=$(DEVICE) SHMSYNC_TEST_TENSORS=host && \
	  $(PYTEST) -n $(JOBS) -k "shm or test_devices" \
	  $(abspath $(SCHEMES_ON_DEVICES) tests/collectors/test_devices.py)


# What needs NVIDIA GPUs, and over a stand-in what does not; a machine without one skips the former and says why.
test-gpu: $(STAMP)
	$(PYTEST) -rs -m '' $(abspath tests/gpu) $(abspath tests/unit/memory/cuda) $(ARGS)

# A storm of troubles over one scheme, or an arena. SEED repeats the events of a storm.
SECONDS ?= 600
OF ?= shared-memory
storm: $(STAMP)
	cd / && PYTHONPATH=$(abspath tests) OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m support.storms.storm --of $(OF) \
	  --seconds $(SECONDS) $(addprefix --seed ,$(SEED)) $(ARGS)

# The fuzzers: INPUTS for each, libFuzzer's over the native core where there is clang. SEED repeats the inputs.
INPUTS ?= 1000000
FUZZ := $(abspath build)/native-fuzz
fuzz: $(STAMP)
	cd / && PYTHONPATH=$(abspath tests) OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m support.fuzz.fuzz --inputs $(INPUTS) \
	  $(addprefix --seed ,$(SEED)) $(ARGS)
	@command -v clang++ >/dev/null || { echo "the native fuzzers are skipped: they need clang (apt install clang)"; exit 0; }; \
	cd native && $(abspath $(BIN))/cmake --preset fuzz && $(abspath $(BIN))/cmake --build --preset fuzz -j2 || exit 1; \
	for each in segment; do mkdir -p $(FUZZ)/found/$$each; \
	  $(FUZZ)/fuzz/fuzz_$$each -runs=$(INPUTS) -max_len=512 -timeout=60 -rss_limit_mb=1024 $(addprefix -seed=,$(SEED)) \
	    -print_final_stats=1 -artifact_prefix=$(FUZZ)/found/ $(FUZZ)/found/$$each fuzz/corpus/$$each || exit 1; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'native/*.hpp' 'native/*.cpp')

# The tests of the integration beside the oldest TorchRL that works.
test-torchrl-0.13: $(STAMP)
	[ -d $(VENV)/torchrl-0.13 ] || $(BIN)/pip install -q --no-deps --target $(VENV)/torchrl-0.13 'torchrl~=0.13.0'
	export PYTHONPATH=$(abspath $(VENV))/torchrl-0.13 && $(PYTEST) -n $(JOBS) $(abspath tests/integrations) $(ARGS)

# TorchRL's own tests with the integration's scheme, where TORCHRL_CHECKOUT names a checkout of its sources.
test-upstream: $(STAMP)
	cd / && OMP_NUM_THREADS=1 $(abspath $(BIN))/python $(abspath tests/upstream/run_torchrl.py) --both $(ARGS)

# The tests that kill and stop processes at each step of the protocol, with a build of their own that has failpoints.
# CHOICE=all: those that are marked slow too.
FAILPOINTS := $(VENV)/failpoints
$(FAILPOINTS)/.installed: $(STAMP)
	rm -rf $(FAILPOINTS)
	$(BIN)/pip install -q --no-deps --no-build-isolation --target $(FAILPOINTS) \
	  -C cmake.define.SHMSYNC_FAILPOINTS=ON -C build-dir=build/failpoints .
	touch $@

test-failpoints: $(FAILPOINTS)/.installed
	export PYTHONPATH=$(abspath $(FAILPOINTS)) && $(PYTEST) -n $(JOBS) $(if $(filter all,$(CHOICE)),-m '') $(abspath tests/failpoints) $(ARGS)

# The stub of the native module is generated by the build; mypy wants it beside the sources.
types: $(STAMP)
	cp $(VENV)/lib/python3*/site-packages/shmsync/_native.pyi shmsync/
	$(BIN)/mypy

# PRESET = dev, asan-ubsan or tsan
PRESET ?= dev
native-test: $(STAMP)
	cd native && $(abspath $(BIN))/cmake --preset $(PRESET) && $(abspath $(BIN))/cmake --build --preset $(PRESET) -j2 \
	  && $(abspath $(BIN))/ctest --preset $(PRESET)

sanitize:
	$(MAKE) native-test PRESET=asan-ubsan
	$(MAKE) native-test PRESET=tsan

model:
	bash native/tests/model/run.sh

litmus:
	$(PYTHON) native/tests/litmus/run.py

# The sdist, and from it the wheel for PYTHON, checked, and tried in a clean environment; they lie in build/wheel/dist.
wheel:
	PYTHON=$(PYTHON) bash tools/wheel.sh

# The figures of the docs in one table, in at most five minutes; ARGS=--docs puts it into docs/performance.md and README.md.
# BENCH = table, calls, peers, distributed or gpu.
BENCH ?= table
bench: $(STAMP)
	cd / && $(abspath $(BIN))/python $(abspath bench/$(BENCH).py) --out $(abspath bench-results) $(ARGS)

$(VENV)/.tools: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy
	$(BIN)/pip install -q -c constraints.txt 'scikit-build-core>=0.11' 'nanobind>=2.2' cmake ninja
	touch $@

$(STAMP): $(VENV)/.tools $(SOURCES)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation '.[demo,docs,test,lint]'
	touch $@

# The documentation as a site, in build/site. A warning, such as a link that leads nowhere, is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build $(VENV) demo-results bench-results
