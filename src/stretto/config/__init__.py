"""The typed run configuration."""

from stretto.config.load import ConfigError, config_from_dict, dump_toml, load_config
from stretto.config.run import RunConfig

__all__ = ["ConfigError", "RunConfig", "config_from_dict", "dump_toml", "load_config"]
