# make          the environment in .venv
# make demo     import -> verify -> export -> generate on the tiny checkpoint in examples/
# make test     lint, types and tests, as continuous integration runs them
# make faults   the seeded faults of every family but Qwen3 (make test has those), three quarters of an hour
# make real     the tests on the real Gemma 3 270M weights
# make fuzz     a coverage-guided search for files that break the readers, four minutes
# make lint     ruff and the type checker alone
# make clean    everything these made

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
REAL := .real/gemma-3-270m
export JAX_PLATFORMS ?= cpu

.PHONY: venv demo test faults real fuzz lint clean

venv: $(VENV)/.done

# torch goes first and by its exact version: asked for through another package, pip may pick a different build of it.
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh .demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder

faults: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m faults -n 2 --dist loadfile --no-loadscope-reorder

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

real: $(REAL)/config.json
	DEWCONV_GEMMA3_270M="$(CURDIR)/$(REAL)" $(BIN)/pytest -q -m real

$(REAL)/config.json: benchmarks/make_gemma3_270m.py | venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,real]'
	$(BIN)/python benchmarks/make_gemma3_270m.py $(REAL)

fuzz: venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,fuzz]'
	for target in header index config manifest; do $(BIN)/python benchmarks/fuzz.py $$target --seconds 60 || exit 1; done

clean:
	rm -rf $(VENV) .demo .real build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
