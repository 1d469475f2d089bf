"""A checked profile: inspect, then prediction against truth; in a folder with a page, continued after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.checkpoints.loaded import Loaded
from headwise.checkpoints.profiled import PROFILE, TENSORS, Profile
from headwise.data.texts import Files
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.progress import Progress, silent
from headwise.files.writing import check_writable
from headwise.records import profile as records
from headwise.records.settings import InspectConfig, OpenConfig, ReadConfig
from headwise.reduction.plans import slider
from headwise.report.page import write_page
from headwise.steps.check import check
from headwise.steps.inspect import Measurement, check_usable, prepared
from headwise.steps.inspect.work import Work
from headwise.tracing.placement import place

PAGE = "report.html"


def inspect(
    model: Any,
    tokenizer: Any = None,
    *,
    text: Any = None,
    inputs: Any = None,
    config: InspectConfig | None = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    checks: bool = True,
    progress: Progress = silent,
) -> Profile:
    """What every head of ``model`` really uses, measured on text, and how far predictions from it can be trusted.

    ``model`` is a model of transformers, which is left as it was (or a folder or Hub id, whose tokenizer is found
    there). ``text`` may be a string, a list of strings, a list of dialogues ``{"messages": [...]}``, a
    `datasets.Dataset` with the column ``text`` or ``messages``, or a `pathlib.Path`; by default it is what comes with
    headwise. Models that do not read text take ``inputs``: batches as the model takes them, a folder of pictures or a
    .npz file. ``opening`` says where and in which precision to run; by default a model stays on its device,
    and one that is opened here goes to a GPU if there is one. Without
    ``checks`` no reduced models are built to hold predictions against, and plans promise less.

    >>> profile = hw.inspect(model, tokenizer, text=texts, config=hw.InspectConfig(tokens=256))
    >>> len(profile.layers) == model.config.num_hidden_layers
    True
    """
    with prepared(
        Loaded.of(model, tokenizer, opening),
        text=text,
        inputs=inputs,
        config=config or InspectConfig(),
        reading=reading or ReadConfig(),
        opening=opening,
    ) as measurement:
        return _checked(measurement, checks=checks, progress=progress)


@locking("output", "inspect")
def inspect_folder(
    source: str | Loaded,
    output: Path,
    *,
    texts: Sequence[str] = (),
    inputs: Path | None = None,
    config: InspectConfig | None = None,
    reading: ReadConfig | None = None,
    opening: OpenConfig | None = None,
    progress: Progress = silent,
) -> Profile:
    """Measure the model at ``source`` and write profile.json, profile.safetensors and report.html into ``output``.

    Without maps (`InspectConfig`) only what planning and compressing need is measured, in less than half the time,
    without checks and without a page.

    ``texts`` are files ("-": standard input; none: the text that comes with headwise, with dialogues for models that
    chat), ``inputs`` a folder of pictures or a .npz file for models that do not read text. A result that is there
    already for the same inputs is returned as it is; an unfinished one is continued.
    """
    config, reading, opening = config or InspectConfig(), reading or ReadConfig(), opening or OpenConfig()
    _check_output(output, source if isinstance(source, str) else source.name)
    loaded = Loaded.of(source, opening=opening)
    if loaded.own:
        loaded.fingerprint()
        place(loaded.model, opening)  # for good
    with prepared(
        loaded,
        text=Files(texts) if texts else None,
        inputs=inputs,
        config=config,
        reading=reading,
        opening=opening,
    ) as measurement:
        known = _known(output, measurement.inputs_hash)
        if known is not None:
            return known
        work = Work(output, measurement.inputs_hash)
        profile = _checked(measurement, checks=config.maps, progress=progress, work=work)
    profile.save_tensors(output)
    if config.maps:
        write_page(profile, output / PAGE, slider(profile))
    profile.record().save(output / PROFILE)
    work.finish()
    return profile


def _checked(measurement: Measurement, *, checks: bool, progress: Progress, work: Work | None = None) -> Profile:
    profile = measurement.take(progress, work)
    if checks:
        profile = check(measurement.loaded.model, profile, opening=measurement.opening, progress=progress)
        check_usable(profile, measurement.loaded.name)
    return profile


def _check_output(output: Path, source: str) -> None:
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; give a folder.")
    if output.resolve() == Path(source).expanduser().resolve():
        raise InputError(f"{output} is the model's own folder; give another one as `output`.")
    check_writable(output / PROFILE)


def _known(output: Path, inputs_hash: str) -> Profile | None:
    """The finished profile in ``output``, if there is one of the same inputs."""
    if not (output / PROFILE).exists():
        return None
    record = records.Profile.load(output / PROFILE)
    if record.inputs_hash != inputs_hash:
        raise InputError(
            f"{output} holds a profile of something else: {record.model.get('source')} on "
            f"{record.settings.get('tokens')} tokens of {record.text.get('name')}, by headwise "
            f"{record.versions.get('headwise')}. Give another folder as `output`, or remove that one."
        )
    if not (output / TENSORS).exists():
        return None
    profile = Profile.load(output)
    if profile.maps and not (output / PAGE).exists():
        write_page(profile, output / PAGE, slider(profile))
    return profile
