# Two commands for a newcomer: `make demo` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests that run side by side; 0: one after the other.
JOBS ?= auto
CORE_SOURCES := $(shell find csrc -path csrc/tests -prune -o -name '*.cpp' -print -o -name '*.h' -print) CMakeLists.txt
CPP_FILES := $(filter %.cpp %.h,$(CORE_SOURCES)) $(wildcard csrc/tests/*.cpp fuzz/*.cpp)

.PHONY: setup build demo test test-all test-core test-ci test-ecosystem test-pytorch conformance bench \
  fuzz sanitize lint format clean

setup: $(VENV)/.tools $(VENV)/.built
build: $(VENV)/.built

# What Shoal needs to compile and run: all that `make demo` installs.
$(VENV)/.runtime: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -c "import tomllib; p=tomllib.load(open('pyproject.toml','rb')); \
	  print('\n'.join(p['build-system']['requires'] + p['project']['dependencies']))" > $(VENV)/runtime.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(VENV)/runtime.txt
	touch $@

# What tests, linters and formatters need on top of that.
$(VENV)/.tools: $(VENV)/.runtime
	$(BIN)/python -c "import tomllib; p=tomllib.load(open('pyproject.toml','rb'))['project']; \
	  print('\n'.join(p['dependencies'] + p['optional-dependencies']['dev']))" > $(VENV)/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	touch $@

# Incremental: the build directory is kept, so only changed translation units are compiled again.
$(VENV)/.built: $(VENV)/.runtime $(CORE_SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

demo: build
	$(BIN)/python examples/demo.py

test: test-core
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --maxprocesses 4

test-all: test-core
	$(BIN)/python -m pytest

# Builds the C++ unit tests in build directory $(1) and runs them. Without their one header it skips
# them, except in CI.
define run_core_tests
	@if echo '#include <doctest/doctest.h>' | $(CXX) -x c++ -E - > /dev/null 2>&1; then \
	  $(BIN)/cmake $(1) > /dev/null && $(BIN)/cmake --build $(1) --target core_tests && $(1)/core_tests; \
	else \
	  echo "C++ unit tests skipped: doctest/doctest.h is missing. Install doctest-dev."; \
	  test -z "$$SHOAL_CI"; \
	fi
endef

test-core: setup
	$(call run_core_tests,build/Release)

# What CI runs beside `make test`: a minute of fuzzing.
test-ci: setup
	$(MAKE) fuzz SECONDS=60

# The libraries that choose a device, in an environment of their own; writes docs/ecosystem.md's table.
# Shoal comes as a wheel of this environment's build: nothing is compiled twice.
ECOSYSTEM := .venv-ecosystem
ECOSYSTEM_LIST := tests/ecosystem/requirements
$(ECOSYSTEM)/.tools: $(VENV)/.tools $(ECOSYSTEM_LIST).txt $(ECOSYSTEM_LIST)-alone.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	grep -vE '^(scikit-build-core|cmake|ninja|ruff|mypy|clang-format|transformers)([>=]|$$)' $(VENV)/requirements.txt \
	  > $(ECOSYSTEM)/requirements.txt
	$(ECOSYSTEM)/bin/pip install --quiet --disable-pip-version-check \
	  -r $(ECOSYSTEM)/requirements.txt -r $(ECOSYSTEM_LIST).txt
	$(ECOSYSTEM)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(ECOSYSTEM_LIST)-alone.txt
	touch $@

test-ecosystem: setup $(ECOSYSTEM)/.tools
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w build/wheel .
	$(ECOSYSTEM)/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps build/wheel/*.whl
	SHOAL_ECOSYSTEM_RESULTS=$(abspath build/ecosystem.json) \
	  $(ECOSYSTEM)/bin/python -m pytest tests/ecosystem
	$(ECOSYSTEM)/bin/python -m tests.ecosystem.report build/ecosystem.json

# PyTorch's own CPU tests without Shoal and with it installed; says how to get them. Half an hour.
test-pytorch: setup
	$(BIN)/python -m tests.ecosystem.pytorch_suite --page docs/ecosystem.md $(ARGS)

# torch's own operator database against local CPU; writes docs/conformance.md.
conformance: setup
	$(BIN)/python -m tests.conformance

# Every speed claim about the device. Wants a quiet machine; ARGS=--quick for a first look.
bench: setup
	$(BIN)/python -m bench.device $(ARGS)

# Ten minutes of mutated streams against the executor's front, with AddressSanitizer and UBSan.
fuzz: setup
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHOAL_FUZZ=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) > /dev/null
	$(BIN)/cmake --build build/fuzz --target executor_fuzz
	ASAN_OPTIONS=detect_leaks=0 build/fuzz/executor_fuzz build/fuzz/corpus $(or $(SECONDS),600)

# The C++ unit tests and the device tests with AddressSanitizer and UBSan in the core.
sanitize: setup
	$(BIN)/cmake -S . -B build/asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHOAL_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) > /dev/null
	$(BIN)/cmake --build build/asan --target _core
	$(call run_core_tests,build/asan)
	$(BIN)/python tests/sanitized.py build/asan

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf build $(VENV)/.built
