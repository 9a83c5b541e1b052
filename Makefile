# On a fresh machine, each command makes what it needs in .venv first:
#   make demo    trains with several processes here; one is killed, another joins
#   make test    runs all tests, tutorials and notebooks
#   make check   looks at format, types, imports and words
#   make docs    renders a page for each protocol into site/
#   make bench   measures each published figure again
#   make ordeal  runs whole benchmarks and long fault tests, before a release
PYTHON ?= python3
VENV := .venv
CLASSIC := .venv-classic
BIN := $(VENV)/bin
# A known-good set of versions; make test CONSTRAINTS= takes the newest.
CONSTRAINTS ?= constraints.txt
export OMP_NUM_THREADS ?= 1
# The many kernels and peers of a test run share what one of them has compiled, even where the shell would have none written.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check docs bench ordeal
.PHONY: test-kernels test-device test-lowest classic binder map picture publish-links
.NOTPARALLEL:

# A new pip, and modules compiled when they are first imported, for most never are: 66 s instead of 203 on two cores.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -U pip
	$(BIN)/pip install -q --no-compile $(addprefix -c ,$(CONSTRAINTS)) -e '.[all,dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/colab-swarm demo

# More workers than cores, for most tests wait for peers and clocks; what is in a file stays together, as a notebook's cells must.
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -r fEs -m "not ordeal" --durations=40 $(NBVAL) tests tutorials

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_style.py tests/test_words.py

# A page for each protocol, with what each public name promises; open site/index.html. A warning is an error.
docs: $(VENV)/installed
	$(BIN)/python -m tests.render_docs site

bench: $(VENV)/installed
	$(BIN)/python -m tests.benchmarks all

# Whole benchmarks, processes killed by the dozen, hours of virtual churn: before a release, on a machine that does nothing else.
ordeal: test-kernels test-device test-lowest
	$(BIN)/python -m pytest -r fEs -m ordeal --durations=0 tests

# The folders that calculate, with the kernels of other processors and with other numbers of threads.
NUMERIC := tests/tensors tests/averaging tests/elastic tests/moe tests/training tests/recipes
KERNEL_TESTS = $(BIN)/python -m pytest -n 2 --dist loadfile -r fEs -m "not ordeal" $(NUMERIC)
test-kernels: $(VENV)/installed
	ATEN_CPU_CAPABILITY=default $(KERNEL_TESTS)
	ATEN_CPU_CAPABILITY=avx2 $(KERNEL_TESTS)
	OMP_NUM_THREADS=4 $(KERNEL_TESTS)
	OMP_NUM_THREADS=16 $(KERNEL_TESTS)

# The CPU passes for a device; what looks into vectors in main memory has its twins in test_device.py, where both are.
ON_DEVICE := tests/training tests/integrations tests/mailbox tests/moe
IN_MAIN_MEMORY := $(addprefix --ignore=tests/training/test_,device.py feedback.py gradients.py replica.py)
test-device: $(VENV)/installed
	COLAB_SWARM_AS_DEVICE=1 $(BIN)/python -m pytest -n 2 --dist loadfile -r fEs -m "not ordeal" $(IN_MAIN_MEMORY) $(ON_DEVICE)

# The lowest versions that pyproject.toml declares, in an environment of their own.
LOWEST := .venv-lowest
LOWEST_TESTS := tests/recipes tests/tensors tests/net tests/notebook tests/workunits tests/moe tests/backbone tests/mailbox
test-lowest: $(VENV)/installed
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q -U pip
	{ $(BIN)/python -m tests.lowest; grep ^torch== constraints.txt; } >$(LOWEST)/pins.txt
	$(LOWEST)/bin/pip install -q --no-compile -c $(LOWEST)/pins.txt -e '.[all]' pytest nbval hypothesis ipykernel 'moto[s3]' flask flask-cors
	$(LOWEST)/bin/python -m pytest -r fEs -m "not ordeal" $(LOWEST_TESTS)

# Classic Notebook with the widgets of Colab's generation; the rest of its kernel's packages are those of .venv.
$(CLASSIC)/installed: tests/browser/classic-requirements.txt $(VENV)/installed
	$(PYTHON) -m venv $(CLASSIC)
	$(CLASSIC)/bin/pip install -q -U pip
	$(CLASSIC)/bin/pip install -q --no-compile -r $<
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>$$($(CLASSIC)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_main.pth
	touch $@

classic: $(CLASSIC)/installed

# What Binder would do with binder/, here, and tutorial 01 in it.
binder: $(VENV)/installed
	COLAB_SWARM_BUILD_BINDER=1 $(BIN)/python -m pytest -s -r fEs tests/test_binder.py

# One line a file of the package, from the first line of its docstring.
map: $(VENV)/installed
	$(BIN)/python -m tests.architecture_map

# The pictures in README: today's panel in JupyterLab (needs chromium), and the curves.
picture: $(VENV)/installed
	$(BIN)/python -m tests.browser.picture
	$(BIN)/python -m tests.readme.proof

# Links, badges and install lines lead to the place where you publish your copy: make publish-links URL=https://github.com/NAME/REPO
publish-links: $(VENV)/installed
	$(BIN)/python -m tests.publish_links "$(URL)"
