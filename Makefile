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

test: $(VENV)/installed
	$(BIN)/python -m pytest --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg tests tutorials

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: $(VENV)/installed
	$(BIN)/python -m colab_swarm.bench all

clean:
	rm -rf $(VENV)
