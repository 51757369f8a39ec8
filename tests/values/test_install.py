"""The advice on how to install the other parts follows from how infercore itself was installed."""

from __future__ import annotations

import importlib.metadata

import pytest

from infercore.registry.known import KNOWN
from infercore.values import install


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Return a function that makes infercore look installed with that ``direct_url.json``."""

    def make(direct_url, *, there=True):
        folder = tmp_path / "infercore-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: infercore\nVersion: 0.1.0\n")
        if direct_url is not None:
            (folder / "direct_url.json").write_text(direct_url)

        def found(name):
            if not there:
                raise importlib.metadata.PackageNotFoundError(name)
            return importlib.metadata.PathDistribution(folder)

        monkeypatch.setattr(importlib.metadata, "distribution", found)
        install.from_an_index.cache_clear()

    yield make
    install.from_an_index.cache_clear()


@pytest.mark.parametrize(
    "direct_url",
    [
        '{"url": "file:///home/me/infercore", "dir_info": {}}',
        '{"url": "file:///home/me/infercore", "dir_info": {"editable": true}}',
        '{"url": "file:///tmp/infercore-0.1.0-py3-none-any.whl", "archive_info": {}}',
    ],
)
def test_what_came_from_a_folder_or_a_file_points_to_a_checkout(installed, direct_url):
    installed(direct_url)
    assert install.of_extra("hub") == "pip install '.[hub]' (in a checkout of infercore)"
    assert install.plugin("openvino") == (
        "pip install ./plugins/openvino (in a checkout of infercore)"
    )
    assert install.model_pack() == "pip install ./models (in a checkout of infercore)"


def test_sources_that_are_not_installed_are_a_checkout(installed):
    installed(None, there=False)
    assert not install.from_an_index()


def test_what_came_from_an_index_names_what_is_on_it(installed):
    installed(None)
    assert install.of_extra("hub") == "pip install 'infercore[hub]'"
    assert install.plugin("openvino") == "pip install infercore-openvino"
    assert install.model_pack() == "pip install infercore-models"
    assert KNOWN["llamacpp"].install == "pip install infercore-llamacpp"
