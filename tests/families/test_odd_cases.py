"""Cases a careful reader tried: task heads, encoders as decoders, unusual positions, norms, dtypes and states."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from headwise.checkpoints.save import save_student
from headwise.families.shapes import shape_of
from headwise.records import InputError, LayerPlan, Plan, cost_of
from headwise.reduction.build import build_reduced, settle_plan
from headwise.tracing.example import example_inputs
from headwise.tracing.probe import watching
from tests.tiny import MODELS, tiny


def narrowed(shape, qk=2, v=3):
    return Plan.make(
        shape,
        tuple(LayerPlan(x.heads, x.kv_heads, x.qk_dim - qk, x.v_dim - v) for x in shape.layers),
    )


def of_class(name, class_name, **changes):
    """A tiny model of another class of the same family."""
    config = tiny(name, **changes).config
    torch.manual_seed(0)
    return getattr(transformers, class_name)(config).eval()


HEADS = [
    ("llama", "LlamaForSequenceClassification"),
    ("mistral", "MistralForTokenClassification"),
    ("qwen3", "Qwen3ForQuestionAnswering"),
    ("phi3", "Phi3ForSequenceClassification"),
    ("gemma3_text", "Gemma3TextForSequenceClassification"),
    ("gpt2", "GPT2ForSequenceClassification"),
    ("opt", "OPTForSequenceClassification"),
    ("gpt_neox", "GPTNeoXForTokenClassification"),
    ("bert", "BertForPreTraining"),
    ("bert", "BertForNextSentencePrediction"),
    ("bert", "BertModel"),
    ("llama", "LlamaModel"),
    ("vit", "ViTModel"),
]


@pytest.mark.parametrize(("name", "class_name"), HEADS)
def test_every_task_head_is_reduced_and_saved(name, class_name, tmp_path):
    model = of_class(name, class_name)
    shape = shape_of(model)
    inputs = example_inputs(model)
    full = build_reduced(model, Plan.full(shape), form="per-layer")
    with torch.no_grad():
        assert torch.allclose(full(**inputs)[0], model(**inputs)[0], atol=1e-5)
    student = build_reduced(model, narrowed(shape))
    assert shape_of(student) == shape.planned(settle_plan(model, narrowed(shape)))
    student.save_pretrained(tmp_path)
    again, info = type(student).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        assert torch.equal(again.eval()(**inputs)[0], student(**inputs)[0])


def test_a_language_model_opens_as_a_classifier(tmp_path):
    model = tiny("llama")
    student = build_reduced(model, narrowed(shape_of(model)))
    student.save_pretrained(tmp_path)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"score.weight"}
    ids = example_inputs(student)["input_ids"]
    with torch.no_grad():
        assert torch.equal(classifier.eval().model(ids)[0], student.model(ids)[0])


def test_classes_that_nothing_could_open_are_refused():
    model = of_class("gpt2", "GPT2DoubleHeadsModel")
    with pytest.raises(InputError, match="No auto class of transformers opens GPT2DoubleHeadsModel"):
        build_reduced(model, narrowed(shape_of(model)))
    with pytest.raises(InputError, match=r"WhisperForCausalLM has no 'encoder\.layers'"):
        shape_of(of_class("whisper", "WhisperForCausalLM", is_encoder_decoder=False))


def test_bert_as_a_decoder_caches():
    model = of_class("bert", "BertLMHeadModel", is_decoder=True)
    student = build_reduced(model, narrowed(shape_of(model)))
    ids = example_inputs(student, tokens=6)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    assert torch.equal(student.generate(ids, **options), student.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("rope", ["llama3", "yarn", "dynamic", "linear"])
def test_scaled_rotary_positions(rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope in ("dynamic", "linear"):
        parameters.pop("original_max_position_embeddings")
    model = tiny("llama", rope_parameters=parameters)
    ids = torch.randint(3, 97, (1, 150))
    with torch.no_grad():
        long_before = model(ids).logits  # longer than the model was made for: dynamic frequencies move
        student = build_reduced(model, Plan.full(shape_of(model)), form="per-layer")
        assert torch.allclose(student(ids[:, :20]).logits, model(ids[:, :20]).logits, atol=1e-5)
        assert torch.allclose(student(ids).logits, long_before, atol=1e-5)


def test_post_norm_opt_keeps_its_norm_without_attention():
    model = tiny("opt", do_layer_norm_before=False)
    shape = shape_of(model)
    plan = Plan.make(shape, (LayerPlan(0, 0, 0, 0), *(LayerPlan.full(layer) for layer in shape.layers[1:])))
    student = build_reduced(model, plan)
    assert shape_of(student) == shape.planned(plan)
    assert student.model.decoder.layers[0].self_attn_layer_norm.weight is not None


def test_gpt2_keeps_each_layers_scale_when_layers_are_dropped():
    model = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    shape = shape_of(model)
    plan = Plan.make(
        shape, tuple(replace(LayerPlan.full(layer), dropped=i == 0) for i, layer in enumerate(shape.layers))
    )
    inputs = example_inputs(model)
    with torch.no_grad():
        outputs = [build_reduced(model, plan, form=form)(**inputs).logits for form in ("stock", "per-layer")]
    assert torch.allclose(*outputs, atol=1e-5)


def test_norms_with_biases_are_kept_whole_or_refused():
    model = tiny("phi", qk_layernorm=True)
    shape = shape_of(model)
    assert shape.layers[0].norm == "affine"
    assert shape.total_parameters() == sum(p.numel() for p in model.parameters())
    inputs = example_inputs(model)
    full = build_reduced(model, Plan.full(shape), form="per-layer")
    with torch.no_grad():
        assert torch.allclose(full(**inputs).logits, model(**inputs).logits, atol=1e-5)
    with pytest.raises(InputError, match="a norm with biases"):
        narrowed(shape)


def test_norm_weights_are_counted_as_they_are_stored():
    model = tiny("qwen3")
    shape = shape_of(model)
    alike = Plan.make(shape, tuple(LayerPlan(4, 2, 4, 4, rope_pairs=((0, 2), (2, 0))) for _ in shape.layers))
    own = Plan.make(shape, tuple(LayerPlan(4, 2, 4, 4, rope_pairs=((0, 2), (1, 3))) for _ in shape.layers))
    for plan, form in ((alike, "stock"), (alike, "per-layer"), (own, "per-layer"), (narrowed(shape, v=1), "auto")):
        student = build_reduced(model, plan, form=form)
        real = sum(p.numel() for p in student.parameters())
        assert shape.planned(settle_plan(model, plan, form)).total_parameters() == real
        small = shape_of(student)
        fewer = Plan.make(small, tuple(LayerPlan(2, 1, layer.qk_dim, layer.v_dim) for layer in small.layers))
        again = build_reduced(student, fewer)
        assert small.planned(fewer).total_parameters() == sum(p.numel() for p in again.parameters())
    with torch.no_grad():
        ids = example_inputs(model)["input_ids"]
        stock, per_layer = (build_reduced(model, alike, form=form)(ids).logits for form in ("stock", "per-layer"))
    assert torch.allclose(stock, per_layer, atol=1e-5)


def test_the_settled_plan_is_what_was_built():
    model = tiny("llama")
    plan = narrowed(shape_of(model), qk=4, v=4)
    settled = settle_plan(model, plan, "stock")
    assert len({pairs for (change,) in settled.layers for pairs in change.rope_pairs}) == 1
    ids = example_inputs(model)["input_ids"]
    with torch.no_grad():
        first, second = (build_reduced(model, each, form="stock")(ids).logits for each in (plan, settled))
    assert torch.equal(first, second)
    assert all(change.rope_pairs for (change,) in settle_plan(model, plan).layers)


def test_whisper_flops_are_those_torch_counts():
    model = tiny("whisper")
    model.set_attn_implementation("eager")
    inputs = example_inputs(model, tokens=9)
    sound, ids = inputs["input_features"][:1], inputs["decoder_input_ids"][:1]
    cost = cost_of(shape_of(model), context=8)
    with torch.no_grad():
        with FlopCounterMode(display=False) as encoding:
            encoded = model.get_encoder()(sound)
        first = model(encoder_outputs=encoded, decoder_input_ids=ids[:, :8])
        with FlopCounterMode(display=False) as decoding:
            model(encoder_outputs=encoded, decoder_input_ids=ids[:, 8:], past_key_values=first.past_key_values)
    cross = 2 * 2 * 32 * 4 * (8 + 8)  # keys and values of the source, two decoder layers, for each source token
    assert encoding.get_total_flops() == (cost.prefill_flops - cross) * 20
    assert decoding.get_total_flops() == cost.decode_flops


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_image_flops_are_those_torch_counts_but_for_the_extra_tokens(name):
    model = tiny(name)
    model.set_attn_implementation("eager")
    inputs = {"pixel_values": example_inputs(model)["pixel_values"][:1]}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    tokens = 9 + (1 if name == "vit" else 2)
    patch = 2 * 3 * 4 * 4 * 32
    head = 2 * 32 * 5
    predicted = cost_of(shape_of(model), context=tokens).prefill_flops * tokens
    assert counter.get_total_flops() - head == predicted - (tokens - 9) * patch


def test_two_models_can_be_watched_at_once():
    teacher = tiny("llama")
    student = build_reduced(teacher, narrowed(shape_of(teacher)))
    widths = {"teacher": set(), "student": set()}
    inputs = example_inputs(teacher)
    with (
        torch.no_grad(),
        watching(teacher, lambda path, a: widths["teacher"].add(a.v_BGSV.shape[-1])),
        watching(student, lambda path, a: widths["student"].add(a.v_BGSV.shape[-1])),
    ):
        teacher(**inputs)
        student(**inputs)
    assert widths == {"teacher": {8}, "student": {5}}


def test_a_student_in_training_mode_is_saved_as_it_is(tmp_path):
    model = tiny("gpt2").train()
    plan = narrowed(shape_of(model))
    student = build_reduced(model, plan)
    save_student(student, tmp_path / "out", plan=plan, source="")
    assert student.training


def test_double_precision_is_saved(tmp_path):
    model = tiny("llama").double()
    plan = narrowed(shape_of(model))
    assert save_student(build_reduced(model, plan), tmp_path / "out", plan=plan, source="")["difference"] == 0


def test_a_student_of_a_frozen_teacher_can_be_trained():
    model = tiny("llama").requires_grad_(False)
    student = build_reduced(model, narrowed(shape_of(model)))
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_students_can_be_pickled_and_copied():
    model = tiny("llama")
    student = build_reduced(model, narrowed(shape_of(model)))
    ids = example_inputs(model)["input_ids"]
    with torch.no_grad():
        for twin in (pickle.loads(pickle.dumps(student)), copy.deepcopy(student)):
            assert torch.equal(twin(ids).logits, student(ids).logits)
            assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in student.parameters()}


def test_heads_wider_than_the_model():
    model = tiny("llama", hidden_size=8, head_dim=16)
    student = build_reduced(model, narrowed(shape_of(model), qk=2, v=4))
    inputs = example_inputs(model)
    with torch.no_grad():
        assert torch.isfinite(student(**inputs).logits).all()
    values_only = build_reduced(model, narrowed(shape_of(model), qk=0, v=4))  # 12 of 16 dimensions, rank at most 8 + 1
    with torch.no_grad():
        assert torch.allclose(values_only(**inputs).logits, model(**inputs).logits, atol=1e-4)


def test_stock_students_do_not_inherit_foreign_code(tmp_path):
    model = tiny("phi3")
    model.config.auto_map = {"AutoConfig": "configuration_phi3.Phi3Config"}
    shape = shape_of(model)
    plan = Plan.make(
        shape, tuple(replace(LayerPlan.full(layer), dropped=i == 1) for i, layer in enumerate(shape.layers))
    )
    found = save_student(build_reduced(model, plan), tmp_path / "out", plan=plan, source="")
    assert found["class"] == MODELS["phi3"][1]


def test_weights_that_are_not_numbers_are_refused():
    model = tiny("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"layers\.1\.self_attn are not all finite"):
        build_reduced(model, narrowed(shape_of(model)))


def test_loading_in_another_dtype_keeps_the_pairs(tmp_path):
    model = tiny("llama")
    student = build_reduced(model, narrowed(shape_of(model)))
    student.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert half.model.layers[0].self_attn.rope_pairs.dtype == torch.long
    ids = example_inputs(model)["input_ids"]
    with torch.no_grad():
        assert torch.allclose(half(ids).logits.float(), student(ids).logits, atol=0.2)
