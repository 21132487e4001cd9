# The book, its tests, and everything around them. Plain `make` lists what there is.
#
# Each target makes what it needs, and only when something it depends on changed. A virtual environment in
# .venv holds the pinned tools; to use another one (conda), say `make BIN=$CONDA_PREFIX/bin ...`.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

SCALE ?= classroom
SEED ?= 0
PORT ?= 8000
TEST_WORKERS ?= auto
TEST_MARKS ?= not slow and not gpu and not site
PYTEST_FLAGS ?=
SUBMISSIONS ?= submissions
GRADES ?= build/grades
HIDDEN_SEED ?=
JOBS ?= 1
LATE ?=
REQUIRE_RECORD ?=
SOLUTIONS ?= yes
REQUIRE_PYTHONS ?=
PACKAGES ?=
PKG ?= conductor
COUNT ?= 10

VENV := .venv
BIN ?= $(VENV)/bin
# what fills the environment names its stamp, so that a pulled lock fills it again, whatever the files' times are
LOCKED := $(shell cat requirements.lock pyproject.toml .ci/environment | cksum | cut -d ' ' -f 1)
ENV := $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/ready-$(LOCKED))

UV_VERSION := 0.13.8
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

export HF_HUB_OFFLINE ?= 1
# each chapter, worker and test process imports the same thousands of modules: compiled once, they load in half the time
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help book playground book-traces notebooks test quick test-slow test-pythons test-kernels mutants test-site screenshots epub readme serve-book classroom grade traces model check format clean env

help: ## List the targets
	@printf 'Targets (variables in brackets):\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nStart with `make book`; the first run fills $(VENV), which takes a minute or two.\n'

# the chapters in a make of their own: in a parallel one they would begin before the traces are there
book: playground book-traces ## Execute the chapters and render the book; ends with the path to open [SCALE SEED OFFLINE SOLUTIONS=no]
	@$(MAKE) notebooks
	@$(BIN)/python -m mooncake_lab.book.rendering.statements book $(if $(REQUIRE_RECORD),--require-record)
	@$(BIN)/python -m mooncake_lab.book.rendering.render book $(if $(filter no,$(SOLUTIONS)),--without-solutions)

# before the chapters, which take minutes: what cannot be fetched is said at once
playground: $(ENV)
	@$(BIN)/python -m mooncake_lab.book.playground.assets book/_static/playground --cache build/pyodide $(if $(filter-out 0,$(OFFLINE)),--offline)

# at most 20 s, and never an error: where they cannot be fetched, the book uses twins
book-traces: $(ENV)
	@$(BIN)/python -m mooncake_lab.book.rendering.fetch data/traces $(if $(filter-out 0,$(OFFLINE)),--offline)

notebooks: $(ENV) build/kernels ## Execute the chapters that changed, in parallel [SCALE SEED]
	@$(BIN)/mooncake-lab batch --scale $(SCALE) --seed $(SEED)

test: $(ENV) build/kernels ## Check everything that needs neither minutes nor a GPU [PYTEST_FLAGS]
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal -m '$(TEST_MARKS)' $(PYTEST_FLAGS)

# each test process would compile the CPU kernels for itself: 25 s of a core for float32, 35 s for bfloat16
build/kernels: $(wildcard mooncake_lab/engine/backends/cpu*.py) $(ENV)
	@mkdir -p build
	@for dtype in float32 bfloat16; do $(BIN)/python -c "from mooncake_lab.engine import load_model, warm_up; \
	warm_up(load_model('random:lab-tiny', device='cpu', dtype='$$dtype'))" & jobs="$${jobs:-} $$!"; done; \
	for job in $$jobs; do wait $$job; done
	@touch $@

quick: $(ENV) ## Check one package while you work on it: its tests, style and types [PKG=conductor]
	@test -d mooncake_lab/$(PKG) && test -d tests/$(PKG) || \
	{ echo "make quick: PKG=$(PKG) is no package with tests; say for example: make quick PKG=conductor" >&2; exit 1; }
	@$(BIN)/ruff check --quiet mooncake_lab/$(PKG) tests/$(PKG) && $(BIN)/ruff format --quiet --check mooncake_lab/$(PKG) tests/$(PKG)
	@$(BIN)/basedpyright mooncake_lab/$(PKG)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -q -n $(TEST_WORKERS) -m '$(TEST_MARKS)' $(PYTEST_FLAGS) tests/$(PKG)

test-slow: $(ENV) ## The tests that take minutes, or ask the network [PYTEST_FLAGS]
	@$(BIN)/pytest -m 'slow and not gpu' $(PYTEST_FLAGS)

test-pythons: $(ENV) ## The tests that need no torch, on each Python 3.11 to 3.13 that is installed [REQUIRE_PYTHONS PYTEST_FLAGS]
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python tests/helpers/pythons.py $(if $(REQUIRE_PYTHONS),--require) -- \
	-n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-kernels: build/triton/ready ## Check the GPU kernels without a GPU: interpreted, and compiled for A100, H100, B200 [PYTEST_FLAGS]
	@export PYTHONPATH=build/triton OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; \
	TRITON_INTERPRET=1 $(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS) tests/gpu/test_triton.py; \
	$(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS) tests/bench/test_kernel_resources.py

# triton of the release that belongs to the pinned torch, and the newest numpy that its interpreter works with
build/triton/ready: Makefile $(ENV)
	@rm -rf build/triton
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target build/triton triton==3.7.1 numpy==2.3.5 || \
	{ echo "make test-kernels: Triton 3.7.1 and numpy 2.3.5 could not be installed into build/triton" >&2; exit 1; }
	@touch $@

mutants: $(ENV) ## Plant small faults in packages and count how many their tests notice [PACKAGES COUNT SEED]
	@$(BIN)/python tests/helpers/mutants.py $(PACKAGES) --count $(COUNT) --seed $(SEED)

test-site: $(ENV) ## Read the built book in a headless browser; leaves book/_build/accessibility.csv
	@$(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal -m site tests/site --ignore=tests/site/test_screenshots.py $(PYTEST_FLAGS)

screenshots: book ## Picture every page, light, dark and on a phone, into tests/site/screenshots
	@$(BIN)/pytest -q tests/site/test_screenshots.py
	@echo "Look at tests/site/screenshots"

epub: book ## The book as one file for e-book readers, book/_build/epub/mooncake-run.epub
	@$(BIN)/python -m mooncake_lab.book.rendering.render book --epub

readme: book ## Write the results in the README from the book's numbers
	@$(BIN)/python -m mooncake_lab.book.paper.pages README.md book/_generated

serve-book: book ## Serve the built book on this machine, with search [PORT]
	@echo "http://127.0.0.1:$(PORT)  (Ctrl-C ends it)"
	@exec $(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory book/_build/html

classroom: $(ENV) ## The students' versions of the assignments, into build/classroom
	@$(BIN)/mooncake-lab classroom build --out build/classroom

grade: $(ENV) ## Grade a folder of submissions [SUBMISSIONS=dir GRADES=dir HIDDEN_SEED JOBS LATE=10%/day]
	@$(BIN)/mooncake-lab classroom grade "$(SUBMISSIONS)" --out "$(GRADES)" --seed "$(HIDDEN_SEED)" --jobs $(JOBS) --late "$(LATE)"

traces: $(ENV) ## Fetch the released traces into data/traces, checked by fingerprint
	@failed=0; for name in conversation synthetic toolagent arxiv; do \
	$(BIN)/mooncake-lab trace fetch $$name --to data/traces || failed=1; done; exit $$failed

model: $(ENV) ## Train the small model of the compression chapter from scratch; interrupted, it goes on
	@$(BIN)/python data/models/lab-recall/train.py --output data/models/lab-recall

check: $(ENV) ## Style, types, floors, and notebooks without outputs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports
	@$(BIN)/nbstripout --verify $(NBSTRIPOUT) notebooks/*.ipynb notebooks/assignments/*.ipynb

format: $(ENV) ## Put code and notebooks into shape
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/nbstripout $(NBSTRIPOUT) notebooks/*.ipynb notebooks/assignments/*.ipynb

clean: ## Remove what can be made again, except the environment
	@rm -rf book/_build book/chapters book/_generated book/_static/playground tests/site/screenshots build/kernels
	@rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find mooncake_lab tests book -name __pycache__ -type d -prune -exec rm -rf {} +

env: $(ENV) ## Make the environment from the pinned requirements
	@echo "Environment: $(BIN)"

# what running a notebook leaves behind, besides its outputs
NBSTRIPOUT := --keep-id --extra-keys 'metadata.papermill metadata.mooncake_lab cell.metadata.papermill'

# --- the environment ----------------------------------------------------------------------------------------------

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3 python,$(shell \
	command -v $(name) >/dev/null && $(name) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo $(name))))

$(VENV)/ready-$(LOCKED):
	@bash .ci/environment "$(PYTHON)" "$(VENV)" "$(UV_VERSION)" "$(TORCH_CPU_INDEX)"
	@rm -f $(VENV)/ready*
	@touch $@
