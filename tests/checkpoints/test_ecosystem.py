"""Reduced models under the tools people use: generate, pipelines, Trainer, PEFT, torch.compile, lm-eval."""

import json

import pytest
import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline

from headwise.families.shapes import shape_of
from headwise.records import LayerPlan, Plan
from headwise.reduction.build import build_reduced
from headwise.tracing.example import example_inputs
from tests.commands import finished, python
from tests.tiny import BACKENDS, DECODERS, REDUCIBLE, tiny
from tests.tokens import save_tokenizer


def reduced(name, **changes):
    """Every kind of change at once: no attention in the first layer, unequal widths, own RoPE pairs, merged heads."""
    model = tiny(name, **changes)
    shape = shape_of(model)
    layers = [LayerPlan(layer.heads, layer.kv_heads, layer.qk_dim - 2, layer.v_dim - 3) for layer in shape.layers]
    layers[0] = LayerPlan(0, 0, 0, 0)
    last = shape.layers[-1]
    layers[-1] = LayerPlan(last.heads, 1, last.qk_dim - 4, last.v_dim)
    return build_reduced(model, Plan.make(shape, tuple(layers)))


@pytest.fixture
def folder(tmp_path):
    student = reduced("llama")
    student.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", [None, "static"])
def test_padded_batches_generate_what_single_texts_do(name, cache):
    student = reduced(name)
    long, short = example_inputs(student, tokens=10)["input_ids"]
    short = short[:6]
    batch = torch.stack((long, torch.cat((torch.zeros(4, dtype=torch.long), short))))
    mask = torch.stack((torch.ones_like(long), torch.cat((torch.zeros(4, dtype=torch.long), torch.ones_like(short)))))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    both = student.generate(batch, attention_mask=mask, **options)[:, 10:]
    for row, text in zip(both, (long, short), strict=True):
        alone = student.generate(text[None], attention_mask=torch.ones_like(text)[None], **options)
        assert torch.equal(row, alone[0, len(text) :])


READERS = [name for name in REDUCIBLE if name not in ("vit", "deit", "whisper")]


@pytest.mark.parametrize(("name", "backend"), [pair for pair in BACKENDS if pair[0] in READERS])
def test_right_padding_does_not_reach_the_text(name, backend):
    student = reduced(name)
    student.set_attn_implementation(backend)
    ids = example_inputs(student, tokens=8)["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 5:] = 0
    with torch.no_grad():
        padded, alone = student(ids, attention_mask=mask)[0], student(ids[:, :5])[0]
    if padded.ndim == 3:
        padded = padded[:, :5]
    assert torch.allclose(padded, alone, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3_text", "gpt_neox"])
def test_beams_and_sampling(name):
    student = reduced(name)
    ids = example_inputs(student, tokens=6)["input_ids"]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "eos_token_id": None}
    beams = student.generate(ids, num_beams=3, do_sample=False, **options)
    assert torch.equal(beams, student.generate(ids, num_beams=3, do_sample=False, use_cache=False, **options))
    torch.manual_seed(0)
    sampled = student.generate(ids, do_sample=True, **options)
    torch.manual_seed(0)
    assert torch.equal(sampled, student.generate(ids, do_sample=True, use_cache=False, **options))


def test_whisper_generates_with_every_cache():
    student = reduced("whisper")
    sound = example_inputs(student)["input_features"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = student.generate(sound, use_cache=False, **options)
    assert torch.equal(plain, student.generate(sound, **options))
    assert torch.equal(plain, student.generate(sound, cache_implementation="static", **options))


@pytest.mark.parametrize("name", REDUCIBLE)
def test_gradients_reach_every_parameter_and_checkpointing_keeps_them(name):
    """An orphaned parameter would stop distributed training."""
    student = reduced(name).train()
    inputs = example_inputs(student)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            student.gradient_checkpointing_enable({"use_reentrant": False})
        student.zero_grad()
        torch.manual_seed(0)  # the same dropout both times
        output = student(**inputs)
        sum(t.square().sum() for t in output.values() if torch.is_tensor(t)).backward()
        missing = [n for n, p in student.named_parameters() if p.grad is None and p.requires_grad]
        assert not missing
        gradients.append({n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, first in gradients[0].items():
        assert torch.allclose(first, gradients[1][key], atol=1e-4, rtol=1e-3), key


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_attention_weights_can_be_looked_at(name):
    student = reduced(name)
    student.set_attn_implementation("eager")
    inputs = example_inputs(student, tokens=7)
    with torch.no_grad():
        output = student(**inputs, output_attentions=True)
    assert len(output.attentions) == 2  # one layer has none
    for weights in output.attentions:
        assert weights.shape[-2:] == (7, 7)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)


def test_any_registered_backend_is_called_with_one_width():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    widths = set()

    def narrow_minded(module, query, key, value, mask, **kwargs):
        widths.add((query.shape[-1], key.shape[-1], value.shape[-1]))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("narrow_minded", narrow_minded)
    AttentionMaskInterface.register("narrow_minded", sdpa_mask)
    student = reduced("llama")
    inputs = example_inputs(student)
    with torch.no_grad():
        expected = student(**inputs).logits
        student.set_attn_implementation("narrow_minded")
        assert torch.allclose(student(**inputs).logits, expected, atol=1e-5)
    assert widths == {(8, 8, 8)}


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiles_into_one_graph(name):
    student = reduced(name)
    inputs = example_inputs(student)
    with torch.no_grad():
        expected = student(**inputs, use_cache=False).logits
        compiled = torch.compile(student, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(**inputs, use_cache=False).logits, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # Trainer's own
def test_trainer_trains_saves_and_resumes(tmp_path):
    student = reduced("llama").train()
    rows = [{"input_ids": ids, "labels": ids} for ids in example_inputs(student)["input_ids"].repeat(4, 1)]
    before = student.model.layers[1].self_attn.q_proj.weight.detach().clone()

    def train(model, steps, **resume):
        options = TrainingArguments(
            tmp_path,
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            learning_rate=1e-2,
        )
        trainer = Trainer(model, options, train_dataset=rows)
        trainer.train(**resume)
        return trainer

    train(student, 2)
    assert not torch.equal(student.model.layers[1].self_attn.q_proj.weight, before)
    assert (tmp_path / "checkpoint-2" / "modeling_headwise.py").is_file()
    assert train(reduced("llama").train(), 4, resume_from_checkpoint=True).state.global_step == 4


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_lora_trains_and_merges(targets):
    from peft import LoraConfig, get_peft_model

    student = reduced("llama")
    inputs = example_inputs(student)
    tuned = get_peft_model(student, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2))
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        tuned(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
    with torch.no_grad():
        expected = tuned.eval()(**inputs).logits
        merged = tuned.merge_and_unload()
        assert torch.allclose(merged(**inputs).logits, expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # the pipeline's own
def test_pipeline(folder):
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    text = generate("abc", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith("abc") and len(text) > 3
    assert AutoTokenizer.from_pretrained(folder).decode([1]) == "<s>"


BLOCK = """
import sys
class Block:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "headwise":
            raise ImportError("headwise is not here")
sys.meta_path.insert(0, Block())
"""


def without_headwise(code, tmp_path, *args):
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HOME": str(tmp_path)}
    done = finished(python(BLOCK + code, *args, env=environment))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_plain_transformers_opens_and_generates_without_headwise(name, tmp_path):
    student = reduced(name)
    student.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    code = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("abc", return_tensors="pt")
print(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist())
assert "headwise" not in sys.modules
"""
    printed = without_headwise(code, tmp_path, str(tmp_path / "model"))
    inputs = AutoTokenizer.from_pretrained(tmp_path / "model")("abc", return_tensors="pt")
    assert json.loads(printed) == student.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist()


@pytest.mark.slow
def test_lm_eval_scores_reduced_models_without_headwise(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("abc abc", "hello there")))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(
        "task: local_text\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path}/text.jsonl\ntest_split: test\noutput_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: byte_perplexity\n'
    )
    for name in ("llama", "gpt2"):
        reduced(name).save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name)
    code = """
from lm_eval.__main__ import cli_evaluate
folder, *names = sys.argv[1:]
for name in names:
    model = f"pretrained={folder}/{name},trust_remote_code=True"
    sys.argv = ["lm_eval", "run", "--model", "hf", "--model_args", model, "--tasks", "local_text", "--include_path",
                f"{folder}/tasks", "--output_path", f"{folder}/{name}-scores", "--device", "cpu", "--batch_size", "1"]
    cli_evaluate()
"""
    without_headwise(code, tmp_path, str(tmp_path), "llama", "gpt2")
    for name in ("llama", "gpt2"):
        scores = json.loads(next((tmp_path / f"{name}-scores").rglob("results*.json")).read_text())
        assert scores["results"]["local_text"]["byte_perplexity,none"] > 1
