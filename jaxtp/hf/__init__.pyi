from jaxtp.hf.config_json import read_config as read_config
from jaxtp.hf.loading import load as load
from jaxtp.hf.peft import load_adapters as load_adapters
from jaxtp.hf.peft import save_adapters as save_adapters
from jaxtp.hf.saving import save as save
from jaxtp.hf.saving import stream_weights as stream_weights
