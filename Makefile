# Two commands for a newcomer: `make demo` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h') CMakeLists.txt
CPP_FILES := $(filter %.cpp %.h,$(CORE_SOURCES)) $(wildcard fuzz/*.cpp)

.PHONY: setup build demo test test-all conformance bench fuzz sanitize lint format clean

setup: $(VENV)/.built
build: $(VENV)/.built

$(VENV)/.tools: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -c "import tomllib; p=tomllib.load(open('pyproject.toml','rb'))['project']; \
	  print('\n'.join(p['dependencies'] + p['optional-dependencies']['dev']))" > $(VENV)/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt
	touch $@

# Incremental: the build directory is kept, so only changed translation units are compiled again.
$(VENV)/.built: $(VENV)/.tools $(CORE_SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

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

# The device tests against a core that is built with AddressSanitizer and UBSan.
sanitize: setup
	$(BIN)/cmake -S . -B build/asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHOAL_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) > /dev/null
	$(BIN)/cmake --build build/asan --target _core
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
