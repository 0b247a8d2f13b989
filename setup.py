"""What pyproject.toml cannot say: the wheel carries configs/ as bert_jax/configs."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=['bert_jax*']), 'bert_jax.configs'],
      package_dir={'bert_jax.configs': 'configs'})
