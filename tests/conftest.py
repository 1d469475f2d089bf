import pytest
import torch
import transformers
from hypothesis import settings

settings.register_profile("same examples every time", derandomize=True, deadline=None)
settings.load_profile("same examples every time")


def pytest_collection_modifyitems(items):
    """The longest test begins first, so that no worker waits for it at the end."""
    items.sort(key=lambda item: item.name != "test_demo_does_the_whole_line")


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    """Tests run side by side under xdist: one thread each. Tiny models make transformers warn about their sizes."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
