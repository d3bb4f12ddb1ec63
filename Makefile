# The one door. Each target creates or updates what it needs, in .venv and target.
#   make demo      train a small language model three ways and compare (installs little)
#   make test      all tests, in Rust and Python (installs PyTorch and JAX)
#   make lint      formatting, warnings, types
#   make bench     benchmarks; writes benches/RESULTS.md
#   make docs      API documentation, into target/doc and target/pdoc
#   make develop   .venv with the extension and everything the above need
#   make accept    the acceptance suite, where it lies beside this folder; ACCEPT="test_value.py -x" for a part

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ACCEPT ?=
SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust -name '*.rs' -o -name Cargo.toml)

.PHONY: demo test lint bench docs develop accept clean

demo: $(VENV)/.demo
	cd examples && ../$(BIN)/python numpy_language_model.py --plot ../demo/losses.png

test: $(VENV)/.develop
	cargo test -p gradacc
	$(BIN)/python -m pytest

lint: $(VENV)/.develop
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings
	if rustup target list --installed 2>/dev/null | grep -q $(AARCH64); then cargo check -p gradacc --target $(AARCH64); fi
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest gradacc._core

bench: $(VENV)/.develop
	rm -rf target/criterion
	cargo bench -p gradacc --bench vectorised
	for level in scalar avx2 avx512; do GRADACC_SIMD=$$level cargo bench -p gradacc --bench kernels || exit 1; done
	$(BIN)/python benches/peak_memory.py > target/peak_memory.json
	$(BIN)/python benches/during_backward.py > target/during_backward.json
	$(BIN)/python -m pytest benches -o python_files='bench_*.py' --benchmark-only --benchmark-json=target/benchmarks.json
	$(BIN)/python benches/results.py target/benchmarks.json target/criterion target/peak_memory.json \
		target/during_backward.json benches/RESULTS.md

docs: $(VENV)/.develop
	cargo doc -p gradacc --no-deps
	$(BIN)/pdoc --docformat google --output-directory target/pdoc gradacc

develop: $(VENV)/.develop

accept: $(VENV)/.develop
	@[ -x ../shared/accept/run ] || { echo "the acceptance suite is not there: ../shared/accept" >&2; exit 1; }
	../shared/accept/run $(BIN)/python $(ACCEPT)

clean:
	rm -rf $(VENV) target demo

# The same release extension in both; `maturin develop` puts it beside the sources it belongs to.
$(VENV)/.demo: $(SOURCES) | $(BIN)/maturin
	@$(call need,cc,a C compiler (it links the extension))
	$(call install,demo)
	@touch $@

$(VENV)/.develop: $(SOURCES) | $(BIN)/maturin
	@$(call need,cc,a C compiler (it links the extension))
	@$(call need,c++,a C++ compiler (for the tests))
	$(call install,$(EVERYTHING))
	@touch $@ $(VENV)/.demo

# A virtual environment of its own; uv installs faster, and pip does where there is no uv.
$(BIN)/maturin:
	@$(call need,$(PYTHON),Python 3.10 or later (PYTHON=/path/to/python names one))
	@$(call need,cargo,a Rust toolchain (https://rustup.rs))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "gradacc needs Python 3.10 or later, and $(PYTHON) is $$($(PYTHON) --version)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv || echo "no uv here: pip will do"
	if [ -x $(BIN)/uv ]; then $(BIN)/uv pip install --quiet --python $(BIN)/python $(MATURIN); \
		else $(BIN)/python -m pip install --quiet $(MATURIN); fi

MATURIN := "maturin>=1.16,<2"
AARCH64 := aarch64-unknown-linux-gnu
EVERYTHING := test,lint,demo,docs
need = command -v $(1) >/dev/null || { echo "gradacc needs $(2): $(1) was not found" >&2; exit 1; }
install = . $(BIN)/activate && maturin develop --release --quiet --extras $(1) $$([ -x $(BIN)/uv ] && echo --uv)
