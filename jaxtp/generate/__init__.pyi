from jaxtp.data.tokenizer import ByteTokenizer as ByteTokenizer
from jaxtp.data.tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
from jaxtp.generate.engine import Generator as Generator
from jaxtp.generate.loading import open_tokenizer as open_tokenizer
from jaxtp.generate.request import Piece as Piece
from jaxtp.generate.request import Result as Result
from jaxtp.generate.samples import sample_text as sample_text
from jaxtp.generate.sampling import Settings as Settings
