"""Models opened in a process that has no headwise."""

from headwise.runtime import reopen
from tests.commands import finished, python

CODE = """
import sys, runpy, transformers
class Block:
    def find_spec(self, name, *rest):
        if name.split('.')[0] == 'headwise':
            raise ImportError('headwise is not here')
sys.meta_path.insert(0, Block())
reopen = runpy.run_path(sys.argv[1])
for name in sys.argv[3:]:
    path = f'{sys.argv[2]}/{name}'
    reopen['main'](path, path + '.in', path + '.out', 'eager' if 'gemma2' in name else None)
"""


def reopened_without_headwise(folder, names):
    """The process that opened the models ``names`` in ``folder``, ran them on NAME.in and wrote NAME.out."""
    environment = {"HF_MODULES_CACHE": str(folder / "modules")}
    process = finished(python(CODE, reopen.__file__, folder, *names, env=environment))
    assert process.returncode == 0, process.stderr
    return process
