"""Random valid plans for a model's shape."""

from hypothesis import strategies as st

from headwise.records import LayerPlan, LayerShape, ModelShape, Plan


@st.composite
def layer_plans(draw, layer: LayerShape, *, droppable: bool) -> LayerPlan:
    fate = draw(st.sampled_from(["reduce"] * 6 + ["remove"] + ["drop"] * droppable))
    if fate == "remove":
        return LayerPlan(0, 0, 0, 0)
    per_old = layer.heads // layer.kv_heads
    kv_heads = draw(st.integers(1, layer.kv_heads))
    per_new = draw(st.integers(1, per_old))
    kept_heads = None
    if draw(st.booleans()):
        groups = draw(st.permutations(range(layer.kv_heads)))[:kv_heads]
        kept_heads = tuple(
            group * per_old + head for group in groups for head in draw(st.permutations(range(per_old)))[:per_new]
        )
    elif draw(st.booleans()) and layer.kv_heads > 1:
        kv_heads, per_new = 1, layer.heads  # merge all key/value heads
    half, free = layer.rotary // 2, layer.qk_dim - layer.rotary
    kept_free = draw(st.integers(0, free))
    pairs = draw(st.integers(0 if kept_free else 1, half)) if half else 0
    if not half:
        kept_free = max(kept_free, 1)
    lists = st.permutations(range(half)).map(lambda order: tuple(order[:pairs]))
    return LayerPlan(
        heads=kv_heads * per_new,
        kv_heads=kv_heads,
        qk_dim=2 * pairs + kept_free,
        v_dim=draw(st.integers(1, layer.v_dim)),
        rope_pairs=tuple(draw(lists) for _ in range(kv_heads)) if half else None,
        kept_heads=kept_heads,
        dropped=fate == "drop",
    )


@st.composite
def plans(draw, shape: ModelShape) -> Plan:
    """Some layers reduced, some without attention, some dropped; at least one of those that matter keeps attention."""
    droppable = shape.source_tokens == 0
    layers = [draw(layer_plans(layer, droppable=droppable)) for layer in shape.layers]
    if droppable and all(layer.dropped or not layer.heads for layer in layers):
        layers[-1] = LayerPlan.full(shape.layers[-1])
    if not droppable:
        decoder = [i for i, layer in enumerate(shape.layers) if layer.cache == "tokens"]
        if not any(layers[i].heads for i in decoder):
            layers[decoder[-1]] = LayerPlan.full(shape.layers[decoder[-1]])
    return Plan.make(shape, tuple(layers))
