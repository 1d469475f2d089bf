import pytest
import torch
import transformers
from hypothesis import settings

settings.register_profile("same examples every time", derandomize=True, deadline=None)
settings.load_profile("same examples every time")


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    """Tests run side by side under xdist: one thread each. Tiny models make transformers warn about their sizes."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
