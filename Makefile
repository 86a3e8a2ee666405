# The commands a developer runs are the commands CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes of tests are many: each would compile the project anew where this forbids to keep it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install install-sglang check test nightly unit unit-light engine trainers operators demo demo-accept bench-demo bench-coserve bench-kv bench-host-overhead bench-weights bench-gateway evaluation bench-routing bench-scheduler bench-failover bench-kill bench-stop bench-proxy bench-cli bench-tracing chaos chaos-sim soak fuzz gpu docs protos chart images lock clean

install: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml scripts/install
	scripts/install $(PYTHON) $(VENV)
	touch $@

# SGLang's pins clash with vLLM's: it and ROSE's plugin beside it, in an environment of their own.
install-sglang: .venv-sglang/.pins

.venv-sglang/.pins: requirements/sglang.txt scripts/install-sglang
	scripts/install-sglang $(PYTHON) .venv-sglang

check: install
	scripts/check

# In four processes for two cores, since half of their time is waiting; a file is run by one of
# them. Engine tests need all cores, and with them is what takes as long as they do.
UNIT := $(BIN)/python -m pytest -q -m "not engine and not nightly and not chaos" --dist loadfile --durations=25

unit: install
	$(UNIT) -n 4 $(ARGS)

# Without those that import torch or vLLM, which leaves more of what waits.
unit-light: install
	$(UNIT) -n 4 -p tests.without_torch tests/unit $(ARGS)

engine: install
	$(BIN)/pytest -q tests/engine -m "not nightly" --max-engine-starts=36 --durations=25 $(ARGS)

# Trainers of others, each in an environment of its own, and the clients of scripts/trainer-clients. Those that are not there are skipped.
TRAINERS ?= trl
trainers: install $(TRAINERS:%=.venv-%/.pins)
	$(BIN)/python -m pytest -q tests/trainers -m "not nightly" --durations=10 $(ARGS)

.venv-%/.pins: requirements/trainers-%.txt scripts/trainer-env
	scripts/trainer-env $* $(PYTHON)

# Alerts, panels, dashboard, chart and controller before the programs of others: promtool, Prometheus and Chromium are
# fetched within a bound, an API server is used where it is built or named, and what is skipped is said.
operators: install
	scripts/operator-tests $(ARGS)

test: unit engine

# All of it: also what is marked `nightly`, an hour of deterministic chaos at most, and all that
# needs a real API server, of which none may be skipped: one is built where none is named.
NIGHTLY_SEEDS ?= 10000
nightly: install install-sglang docs
	-scripts/prometheus
	-scripts/chromium
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q tests/unit -n 3 --dist loadfile --timeout=1800 --durations=25 $(ARGS)
	$(BIN)/pytest -q tests/engine --durations=25 $(ARGS)
	$(BIN)/python -m pytest -q tests/trainers --durations=10 $(ARGS)
	$(BIN)/python -m tests.chaos --seeds $(NIGHTLY_SEEDS)
	scripts/cluster-tests
	scripts/engine-matrix --no-tests

# Of benchmarks.
ENGINE ?= vllm

demo: install
	$(BIN)/rose demo $(ARGS)

demo-accept: install
	$(BIN)/rose demo --accept $(ARGS)

bench-demo: install
	$(BIN)/python -m bench.micro.demo_accept $(ARGS)

# ENGINE=sglang has SGLang for host and guest; ARGS="--host sglang" or "--guest sglang" for one of them.
bench-coserve: install $(if $(findstring sglang,$(ENGINE) $(ARGS)),install-sglang)
	$(BIN)/python -m bench.coserve run --host $(ENGINE) --guest $(ENGINE) $(if $(QUICK),--quick) $(ARGS)

bench-kv: install $(if $(filter sglang,$(ENGINE)),install-sglang)
	$(BIN)/python -m bench.micro.kv_return --engine $(ENGINE) --out out/bench/kv-$(ENGINE).json $(ARGS)

# ENGINE=sglang measures SGLang's scheduler in the place of vLLM's.
bench-host-overhead: install $(if $(filter sglang,$(ENGINE)),install-sglang)
	$(if $(filter sglang,$(ENGINE)),.venv-sglang/bin/python -m bench.micro.host_overhead_sglang,$(BIN)/python -m bench.micro.host_overhead) $(ARGS)

bench-weights: install
	$(BIN)/python -m bench.weights $(ARGS)

bench-routing: install
	$(BIN)/python -m bench.micro.routing --out out/bench/routing.json $(ARGS)

bench-scheduler: install
	$(BIN)/python -m bench.micro.scheduler_scale --out out/bench/scheduler.json $(ARGS)

bench-failover: install
	$(BIN)/python -m bench.micro.failover --out out/bench/failover.json $(ARGS)

bench-kill: install
	$(BIN)/python -m bench.kill $(ARGS)

bench-stop: install
	$(BIN)/python -m bench.micro.stop_all --out out/bench/stop.json $(ARGS)

bench-proxy: install
	$(BIN)/python -m bench.micro.proxy --out out/bench/proxy.json $(ARGS)

bench-cli: install
	$(BIN)/python -m bench.micro.cli_answers --out out/bench/cli.json $(ARGS)

bench-tracing: install
	$(BIN)/python -m bench.micro.tracing --out out/bench/tracing.json $(ARGS)

# Tables and pictures of docs/evaluation.md; FULL=1 also the paper's set-ups, TRACE=FILE your users.
evaluation: install
	scripts/evaluation

bench-gateway: install
	$(BIN)/python -m bench.gateway $(if $(QUICK),--quick) $(ARGS)

chaos: install
	$(BIN)/python -m bench.chaos $(ARGS)

soak: install
	$(BIN)/python -m bench.soak $(ARGS)

# Every decoder and every HTTP face, an hour in all; `make fuzz FUZZ_S=60` is what CI runs.
FUZZ_S ?= 3600
fuzz: install
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) $(ARGS)

# Deterministic chaos: one seed, one history, and new seeds each time; a seed that breaks prints how
# to replay it. These are two minutes of two cores.
SEEDS ?= 500
chaos-sim: install
	$(BIN)/python -m tests.chaos --seeds $(SEEDS) $(ARGS)
	$(BIN)/python -m pytest -q tests/unit/chaos -m "chaos and not nightly" -n 2

# On a machine with an NVIDIA GPU, by the Python that has torch for it. Installs nothing.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m bench.gpu $(ARGS)

protos: install
	scripts/protos

# What is generated for the chart, and its images where podman or docker is.
chart: install
	scripts/crd
	scripts/chart

images:
	scripts/images $(ARGS)

# The documentation site, in out/docs. A link that leads nowhere fails.
DOCS_VENV := .venv-docs
docs:
	scripts/docs $(PYTHON) $(DOCS_VENV)

lock:
	scripts/lock $(VENV)
	if [ -x $(DOCS_VENV)/bin/pip ]; then scripts/lock $(DOCS_VENV) requirements/docs.txt; fi

clean:
	rm -rf out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
