# Two commands on a fresh machine: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check bench clean
.NOTPARALLEL:

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[all,dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/colab-swarm demo

# Two processes at once: most tests wait for peers and clocks, notebooks compute.
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg
test: $(VENV)/installed
	@log=$$(mktemp); \
	$(BIN)/python -m pytest $(NBVAL) tutorials tests/notebooks >$$log 2>&1 & notebooks=$$!; \
	$(BIN)/python -m pytest --ignore tests/notebooks tests; failed=$$?; \
	wait $$notebooks || failed=1; cat $$log; rm $$log; exit $$failed

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: $(VENV)/installed
	$(BIN)/python -m colab_swarm.bench all

clean:
	rm -rf $(VENV)
