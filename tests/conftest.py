"""What holds for every test: idle threads sleep, no model hub is asked, property tests repeat themselves."""

from hypothesis import settings

from inference_engine.config import configure_threads_environment, forbid_model_hub

# Conftest is read before any test module, so this comes before the first import of torch and transformers.
configure_threads_environment()
forbid_model_hub()

# A slow machine is not a failure: no deadline.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")
