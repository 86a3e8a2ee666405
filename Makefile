# The commands a developer runs are the commands CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install check test unit engine demo bench-coserve bench-kv bench-host-overhead bench-weights bench-gateway bench-routing chaos gpu protos lock clean

install: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml scripts/install
	scripts/install $(PYTHON) $(VENV)
	touch $@

check: install
	scripts/check

# In two processes: they need a core each (a file that starts processes stays in one). Engine tests need both.
unit: install
	$(BIN)/pytest -q -m "not engine" -n 2 --dist loadgroup $(ARGS)

engine: install
	$(BIN)/pytest -q -m engine $(ARGS)

test: unit engine

demo: install
	$(BIN)/rose demo $(ARGS)

bench-coserve: install
	$(BIN)/python -m rose.bench.coserve run $(if $(QUICK),--quick) $(ARGS)

bench-kv: install
	$(BIN)/python bench/kv_return.py $(ARGS)

bench-host-overhead: install
	$(BIN)/python bench/host_overhead.py $(ARGS)

bench-weights: install
	$(BIN)/python -m rose.bench.weights $(ARGS)

bench-routing: install
	$(BIN)/python bench/routing.py --out out/bench/routing.json $(ARGS)

bench-gateway: install
	$(BIN)/python -m rose.bench.gateway $(if $(QUICK),--quick) $(ARGS)

chaos: install
	$(BIN)/python -m rose.bench.chaos $(ARGS)

# On a machine with an NVIDIA GPU, by the Python that has torch for it. Installs nothing.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m rose.bench.gpu $(ARGS)

protos: install
	scripts/protos

lock:
	scripts/lock $(VENV)

clean:
	rm -rf out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
