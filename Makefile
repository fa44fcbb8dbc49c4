# Every target sets up what it needs: a virtual environment in .venv with the torch of your choice,
# and the native library, built in build/dev into edgeweave/_C.so.
#
#   make demo                        train on real data, stock PyG beside edgeweave
#   make test                        all tests and every example of the documentation
#   make check                       formatters, linters, types, documentation
#   make bench                       the tables of numbers (BENCH=ops|models, BENCH_ARGS=...)
#   make wheel                       wheelhouse/edgeweave-*.whl, checked and tried in a clean environment
#   make sanitize                    the kernels, and the library inside Python, under ASan and UBSan
#   make test-kernels                the kernels alone, without Python or torch
#   make test-aarch64                the same for NEON: cross-built, run under qemu
#   make clean                       remove all of it
#
# PYTHON picks the interpreter, TORCH the torch to build and test with.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BENCH ?= ops models
BENCH_ARGS ?=
PYTEST_ARGS ?=
# What `make sanitize` looks for. Not all of UBSan: its checks of pointers double the time to compile.
SANITIZERS ?= address,signed-integer-overflow,shift,integer-divide-by-zero,bounds,nonnull-attribute,unreachable,float-cast-overflow

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := $(VENV)/constraints.txt
# A change of pyproject.toml, of TORCH or of PYTHON changes the stamp's name, so it is set up again.
STAMP := $(VENV)/.ready-$(shell { cat pyproject.toml; echo "$(TORCH) $(PYTHON)"; } | sha256sum | cut -c1-16)
NATIVE := edgeweave/_C.so
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f -not -name '.*')
# The library is bound to neither Python's ABI nor torch's; check_wheel.py holds it to the glibc of the tag.
WHEEL_TAG := py3-none-manylinux_2_28_$(shell uname -m)

.PHONY: help venv build demo test check format bench wheel sanitize test-kernels test-aarch64 clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(STAMP)

$(STAMP): pyproject.toml
	@echo "==> virtual environment with $(TORCH)"
	@$(PYTHON) -c 'import sys; sys.exit("edgeweave needs Python 3.10 or later, got " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot create a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@rm -f $(VENV)/.ready-*
	$(PIP) install -q "$(TORCH)"
	@# Whatever is installed from here on must live with the torch that was asked for.
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(CONSTRAINTS)
	@echo "==> $$(cat $(CONSTRAINTS)), now the build tools and the development extras"
	$(PIP) install -q -c $(CONSTRAINTS) "scikit-build-core>=0.11" "cmake>=3.26" ninja
	@# In place and without CMake: the .py files are used where they are, and ninja keeps $(NATIVE) fresh.
	$(PIP) install -q -c $(CONSTRAINTS) --no-build-isolation \
	    -C editable.mode=inplace -C wheel.cmake=false -e ".[dev]"
	@touch $@

build: $(NATIVE)

$(NATIVE): $(NATIVE_SOURCES) | $(STAMP)
	@echo "==> native library"
	@# SKBUILD*: what `make wheel`, which packs the same objects, left in this folder's cache.
	$(BIN)/cmake -S . -B build/dev -G Ninja --log-level=NOTICE -U 'SKBUILD*' \
	    -DCMAKE_BUILD_TYPE=Release \
	    -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
	    -DPython3_EXECUTABLE="$(abspath $(BIN))/python"
	$(BIN)/cmake --build build/dev
	@touch $@

demo: $(NATIVE) $(STAMP)
	$(BIN)/edgeweave demo

test: $(NATIVE) $(STAMP)
	@# Not from PyPI as it is: see the script. Where it cannot be had, it says why, and a test is skipped.
	@$(BIN)/python scripts/fetch_perf_analyzer.py build/perf-analyzer || true
	$(BIN)/python -m pytest --doctest-modules edgeweave tests $(PYTEST_ARGS)

check: $(STAMP)
	@echo "==> ruff";         $(BIN)/ruff format --check . && $(BIN)/ruff check .
	@echo "==> mypy";         $(BIN)/mypy
	@echo "==> clang-format"; find csrc tests/native -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	@echo "==> docs";         $(BIN)/python scripts/check_docs.py

format: $(STAMP)
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	find csrc tests/native -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format -i

bench: $(NATIVE) $(STAMP)
	@for what in $(BENCH); do $(BIN)/edgeweave bench $$what $(BENCH_ARGS); done

wheel: $(NATIVE) $(STAMP)
	@rm -rf wheelhouse && mkdir wheelhouse
	@echo "==> wheel"
	$(PIP) wheel -q --no-build-isolation --no-deps \
	    -C build-dir=build/dev -C wheel.tags=$(WHEEL_TAG) -w wheelhouse .
	$(BIN)/python scripts/check_wheel.py wheelhouse/*.whl
	@echo "==> a clean environment without a compiler"
	$(BIN)/python scripts/try_wheel.py --torch "$$(cat $(CONSTRAINTS))" wheelhouse/*.whl

# $(1): folder below build, $(2): more options of CMake
define configure
	$(BIN)/cmake -S . -B build/$(1) -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release \
	    -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -DPython3_EXECUTABLE="$(abspath $(BIN))/python" $(2)
endef

test-kernels: $(NATIVE) $(STAMP)
	$(call configure,dev,-U 'SKBUILD*')
	$(BIN)/cmake --build build/dev --target kernel_tests
	build/dev/tests/native/kernel_tests

sanitize: $(STAMP)
	$(call configure,sanitize,-DEDGEWEAVE_SANITIZE=$(SANITIZERS))
	$(BIN)/cmake --build build/sanitize --target kernel_tests edgeweave_core
	@echo "==> kernels"
	UBSAN_OPTIONS=print_stacktrace=1 build/sanitize/tests/native/kernel_tests
	@echo "==> the library inside Python"
	$(BIN)/python scripts/run_sanitized.py build/sanitize/_C.so

CROSS ?= aarch64-linux-gnu-
QEMU ?= qemu-aarch64
test-aarch64: $(STAMP)
ifeq ($(and $(shell command -v $(CROSS)g++),$(shell command -v $(QEMU))),)
	@echo "make: skipped test-aarch64: it needs $(CROSS)g++ and $(QEMU) (on Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
else
	$(call configure,aarch64,-DEDGEWEAVE_LIBRARY=OFF -DCMAKE_SYSTEM_NAME=Linux \
	    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(CROSS)g++)
	$(BIN)/cmake --build build/aarch64 --target kernel_tests
	@echo "==> the torch side compiles too"
	@headers=$$($(BIN)/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent / "include")'); \
	for source in csrc/*.cpp csrc/ops/*.cpp csrc/dispatch/*.cpp; do \
	    $(CROSS)g++ -std=gnu++17 -fsyntax-only -fvisibility=hidden -Wall -Wextra -Werror -Wno-psabi \
	        -DTORCH_TARGET_VERSION=0x020a000000000000 -isystem "$$headers" $$source; \
	done
	$(QEMU) -L /usr/$(CROSS:-=) build/aarch64/tests/native/kernel_tests
endif

clean:
	rm -rf $(VENV) build dist wheelhouse demo-output bench-output $(NATIVE)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
