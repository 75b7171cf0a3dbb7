# `make help` lists all commands. Environments are made on first use and kept.
SHELL := bash
PYTHON ?= python3
SERVE := .venv/bin
DEV := .venv-dev/bin
# A GPU machine may have its packages elsewhere; the dry run of docs/benchmarks.md works with ours.
GPU_PYTHON ?= $(DEV)/python
PORT ?= 8000
HOST ?= http://127.0.0.1:$(PORT)
# What is installed anywhere: by the Makefile, and in the images.
LOCKS := serve dev optimum indexer train gpu
PIP := -m pip install --quiet --disable-pip-version-check
# If it is set, each process that a test starts compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help run test tests check unit format bench bench-peers bench-gpu dashboard overload kills bench-fresh bench-index bench-encode bench-train figures kill-index kill-writes kill-curate chaos soak claims loadtest knee eval chart image openapi typescript install install-train optimum lock clean bench-keys fuzz-tenants audit

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: install ## serve the example corpus at http://127.0.0.1:8000 (PORT=… for another)
	@$(SERVE)/care demo --port $(PORT)

test: ## everything: linters, types, architecture, all tests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target tests check

# One process more than two cores, because many tests wait; a thread each: threads would wait for each other.
tests: .venv-dev/installed .venv-optimum/installed programs clients/typescript/node_modules
	OMP_NUM_THREADS=1 $(DEV)/pytest --numprocesses 3 $(ARGS)

check: .venv-dev/installed ## linters, types, import rules
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	$(DEV)/mypy
	$(DEV)/lint-imports

unit: .venv-dev/installed ## the tests alone (ARGS='tests/unit -k batcher')
	$(DEV)/pytest $(ARGS)

format: .venv-dev/installed ## let ruff lay out the code
	$(DEV)/ruff check --fix .
	$(DEV)/ruff format .

bench: .venv-dev/installed ## speed of /v1/search beside the bare framework
	$(DEV)/python -m loadtest.bench $(ARGS)

bench-peers: .venv-dev/installed .venv-peers-txtai/installed .venv-peers-infinity/installed ## ours beside txtai and Infinity + FAISS (DATA=…, WEIGHTS=…)
	$(DEV)/python -m loadtest.lab.peers --data $(or $(DATA),../shared/data/eval/cmirb) \
	  --weights $(or $(WEIGHTS),../shared/weights/bge-small-zh-v1.5) $(ARGS)

bench-gpu: ## searches a second on a machine with a GPU (docs/benchmarks.md says what it needs)
	$(GPU_PYTHON) -m loadtest.lab.gpu $(ARGS)

dashboard: .venv-dev/installed programs ## a picture of the dashboard's panels from a short load (ARGS='--output docs/dashboard.png')
	$(DEV)/python -m loadtest.lab.dashboard $(ARGS)

bench-keys: .venv-dev/installed ## what keys cost a search, with and without, turn by turn
	$(DEV)/python -m loadtest.lab.keys $(ARGS)

overload: .venv-dev/installed ## two and ten times what the service can answer (ARGS=--proxy: behind HAProxy)
	$(DEV)/python -m loadtest.lab.overload $(ARGS)

kills: .venv-dev/installed ## engine, worker and Redis killed under load: what fails, for how long
	$(DEV)/python -m loadtest.lab.chaos killed --times 3 $(ARGS)

chaos: .venv-dev/installed programs ## every fault under load: what fails, what is wrong, how long until recovery (10 minutes, root)
	$(DEV)/python -m loadtest.lab.chaos $(ARGS)

soak: .venv-dev/installed ## MINUTES (30) under a low load: memory and descriptors must stay flat
	$(DEV)/python -m loadtest.lab.soak --minutes $(or $(MINUTES),30) $(ARGS)

bench-fresh: .venv-dev/installed ## what documents posted since the last build cost a search
	OPENBLAS_NUM_THREADS=1 $(DEV)/python -m indexer.bench fresh $(ARGS)

bench-index: .venv-dev/installed ## memory and time of a build and a re-index (ARGS='--documents 100000 1000000')
	$(DEV)/python -m indexer.bench index $(ARGS)

bench-encode: ## an LLM's documents a second beside the GPU's limit and sentence-transformers (docs/benchmarks.md)
	$(GPU_PYTHON) -m models.bench.encode --corpus $(or $(CORPUS),../shared/data/eval/cmirb/corpus.jsonl.gz) \
	  --tokenizer $(or $(TOKENIZER),../shared/weights/bge-small-zh-v1.5) --output $(or $(OUTPUT),var/bench-encode) $(ARGS)

figures: .venv-dev/installed ## draw the figures of docs/benchmarks.md from its tables
	$(DEV)/python -m models.bench.figures docs/benchmarks.md docs/figures

bench-train: ## speed and memory of training on a machine with a GPU (ARGS=--tiny runs anywhere)
	$(GPU_PYTHON) -m models.bench.train $(ARGS)

kill-index: .venv-dev/installed ## 50 builds killed with SIGKILL at random moments: each must end like an undisturbed one
	$(DEV)/python -m pytest -s --timeout 0 tests/integration/test_index_kills.py --kills 50 --documents 60 $(ARGS)

kill-writes: .venv-dev/installed ## 300 runs of writers, builds and rollbacks under random kills: nothing acknowledged is lost
	$(DEV)/python -m pytest -s --timeout 0 tests/integration/test_write_kills.py --runs 300 $(ARGS)

fuzz-tenants: .venv-dev/installed ## 100,000 random requests of several tenants: none sees a document of another
	$(DEV)/python -m tests.support.tenants $(ARGS)

kill-curate: .venv-dev/installed ## every curation step killed 20 times: the same output
	$(DEV)/python -m pytest -s --timeout 0 tests/integration/test_curate_kills.py --kills 20 $(ARGS)

claims: .venv-dev/installed .venv-peers-txtai/installed .venv-peers-infinity/installed programs ## what the documents claim, in short form (15 minutes)
	$(DEV)/python -m loadtest.lab.claims $(ARGS)

loadtest: .venv-dev/installed ## Locust against a running service (HOST=…), and its limits (ARGS='--p95-ms 250')
	mkdir -p var/loadtest
	$(DEV)/locust -f loadtest/locustfile.py --headless --only-summary --exit-code-on-error 0 -u 16 -r 16 -t 20s \
	  --host $(HOST) --csv var/loadtest/run $(or $(ARGS),--p95-ms 250 --p99-ms 500)

knee: .venv-dev/installed ## Locust in steps until latency breaks away (HOST=…): HTML report and picture in var/loadtest
	mkdir -p var/loadtest
	$(DEV)/locust -f loadtest/steps.py --headless --only-summary --exit-code-on-error 0 --host $(HOST) \
	  --html var/loadtest/steps.html --picture var/loadtest/steps.png --errors 1 --refused 1 $(ARGS)

NOT_AUDITED := The audit failed. If the lines above list vulnerabilities, update those packages (make lock). If they say that \
  packages could not be audited or that a connection failed, nothing was checked: this network reaches no advisories of \
  PyPI. Try make audit ARGS='-s osv', which asks OSV, or check var/sbom-*.json on a machine that reaches one.
# Strict: a package that could not be looked up fails, or an address without advisories would look like a clean bill.
audit: .venv-audit/installed ## known vulnerabilities of the locks, and a bill of materials (var/sbom-*.json)
	@mkdir -p var
	@for lock in $(LOCKS); do .venv-audit/bin/cyclonedx-py requirements requirements/$$lock.lock \
	  --output-reproducible --of JSON -o var/sbom-$$lock.json && echo "var/sbom-$$lock.json"; done
	@failed=0; for lock in $(LOCKS); do echo "requirements/$$lock.lock:"; .venv-audit/bin/pip-audit --disable-pip \
	  --require-hashes --strict --progress-spinner off -r requirements/$$lock.lock $(ARGS) || failed=1; \
	  done; [ $$failed = 0 ] || { echo "$(NOT_AUDITED)"; exit 1; }

eval: .venv-dev/installed ## judge the bundled encoder on the example corpus (DATA=… for another folder)
	$(DEV)/care eval $(or $(DATA),examples) $(ARGS)

install: .venv/installed ## the serving environment (.venv, no torch)

install-train: .venv-dev/installed ## the environment with torch (.venv-dev): .venv-dev/bin/care train …

optimum: .venv-optimum/installed ## the environment in which Optimum exports (.venv-optimum)

.venv/installed: requirements/serve.lock pyproject.toml
	@echo "Installing the serving environment into .venv …"
	@$(PYTHON) -m venv .venv
	@$(SERVE)/python $(PIP) --require-hashes --no-deps -r requirements/serve.lock
	@$(SERVE)/python $(PIP) --no-deps --editable .
	@touch $@

# torch comes first and alone: an index that offers a CPU build gives that one, and nothing after it asks again.
.venv-dev/installed: requirements/dev.lock pyproject.toml
	@echo "Installing the development environment into .venv-dev …"
	@$(PYTHON) -m venv .venv-dev
	@$(DEV)/python $(PIP) torch==2.13.0
	@$(DEV)/python $(PIP) --require-hashes --no-deps -r requirements/dev.lock
	@$(DEV)/python $(PIP) --no-deps --editable .
	@touch $@

.venv-optimum/installed: requirements/optimum.lock
	@echo "Installing the Optimum environment into .venv-optimum …"
	@$(PYTHON) -m venv .venv-optimum
	@.venv-optimum/bin/python $(PIP) torch==2.13.0
	@.venv-optimum/bin/python $(PIP) --require-hashes --no-deps -r requirements/optimum.lock
	@touch $@

.venv-audit/installed: requirements/audit.lock
	@echo "Installing the tools of the audit into .venv-audit …"
	@$(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/python $(PIP) --require-hashes --no-deps -r requirements/audit.lock
	@touch $@

.venv-peers-%/installed: requirements/peers-%.lock
	@echo "Installing $* into .venv-peers-$* …"
	@$(PYTHON) -m venv .venv-peers-$*
	@.venv-peers-$*/bin/python $(PIP) torch==2.13.0
	@.venv-peers-$*/bin/python $(PIP) --require-hashes --no-deps -r requirements/peers-$*.lock
	@touch $@

# A continuous integration that is not root and has no Debian installs these beforehand; tests that lack one say so.
PROGRAMS := chromium chromedriver haproxy node npm promtool
.PHONY: programs
programs:
	@for each in $(PROGRAMS); do command -v $$each >/dev/null || missing=1; done; [ -z "$$missing" ] || \
	  { echo "Installing Chromium, HAProxy, Node and Prometheus for the tests …"; apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	      chromium chromium-driver haproxy prometheus $$(command -v npm >/dev/null || echo nodejs npm) >/dev/null; }

# Helm 3 or 4. The schemas have an environment of their own, because they weigh 100 MB.
HELM ?= helm
chart: .venv-chart/installed ## lint and render the Helm chart, check the objects against Kubernetes' schemas (needs helm)
	$(HELM) lint --strict deploy/helm/care-search
	{ echo "# Made by \`make chart\` from deploy/helm/care-search with its default values; change those, not this."; \
	  $(HELM) template care deploy/helm/care-search; } > deploy/kubernetes/care-search.yaml
	mkdir -p var
	for metric in queue requests cpu; do $(HELM) template care deploy/helm/care-search --set secret=care \
	  --set keys=care-keys,autoscaling.enabled=true,autoscaling.metric=$$metric > var/chart-$$metric.yaml || exit 1; done
	.venv-chart/bin/kubernetes-validate --strict deploy/kubernetes/care-search.yaml var/chart-*.yaml

.venv-chart/installed:
	@$(PYTHON) -m venv .venv-chart
	@.venv-chart/bin/python $(PIP) kubernetes-validate==1.37.0
	@touch $@

image: .venv-dev/installed ## build the service's image without a container engine, measure and start it (root, debootstrap)
	$(DEV)/python -m tests.support.rootfs $(or $(TARGET),service) --folder $(or $(FOLDER),/var/tmp/care-image)

openapi: .venv-dev/installed ## rewrite docs/openapi.json, from which the TypeScript client is generated
	$(DEV)/python -c "import json; from service.http.app import create_app; from service.settings import Settings; \
	  print(json.dumps(create_app(Settings()).openapi(), ensure_ascii=False, indent=1))" > docs/openapi.json

typescript: .venv-dev/installed clients/typescript/node_modules ## build the TypeScript client and try it in Node
	$(DEV)/pytest tests/clients/test_typescript.py

clients/typescript/node_modules: clients/typescript/package-lock.json
	@echo "Installing the packages of the TypeScript client …"
	@cd clients/typescript && npm ci --silent --no-audit --no-fund
	@touch $@

lock: ## pin every dependency anew (needs uv)
	requirements/compile.sh

clean: ## remove environments, snapshots and caches
	rm -rf .venv .venv-dev .venv-optimum .venv-chart .venv-audit .venv-peers-* var .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache clients/typescript/node_modules clients/typescript/dist
