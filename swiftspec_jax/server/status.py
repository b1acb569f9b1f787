"""Endpoints that tell of the server."""

import fastapi
import prometheus_client
from fastapi import responses
from starlette.exceptions import HTTPException

import swiftspec_jax as ss
from swiftspec_jax.server import answer_types
from swiftspec_jax.server.service import Service

router = fastapi.APIRouter()


@router.get('/v1/models', response_model=answer_types.Models)
async def models(http: fastapi.Request):
  """Lists the one model."""
  return {'object': 'list', 'data': [_describe(http.app.state.service)]}


@router.get('/v1/models/{model:path}', response_model=answer_types.Model)
async def model(model: str, http: fastapi.Request):
  """Describes the model."""
  http.app.state.service.check_model(model)
  return _describe(http.app.state.service)


@router.get('/version', response_model=answer_types.Version)
async def version():
  """Says which version this is."""
  return {'version': ss.__version__}


@router.get('/ping', response_model=answer_types.Health)
@router.get('/health', response_model=answer_types.Health)
async def health(http: fastapi.Request):
  """Says whether requests can be served."""
  service = http.app.state.service
  if service.is_draining:
    raise HTTPException(503, 'the server is shutting down')
  programs = service.engine.programs
  error = service.engine.error or programs.error
  if error is not None:
    raise HTTPException(503, f'the engine has failed: {error!r}; see the log')
  return {
    'status': 'warming up' if programs.is_warming_up else 'ok',
    'num_programs': programs.num_programs,
    'num_compiled_programs': programs.num_compiled,
  }


@router.get('/metrics', response_class=responses.PlainTextResponse)
async def metrics(http: fastapi.Request):
  """Returns figures for Prometheus."""
  return fastapi.Response(
    prometheus_client.generate_latest(http.app.state.service.metrics.registry),
    media_type=prometheus_client.CONTENT_TYPE_LATEST,
  )


def _describe(service: Service) -> answer_types.Model:
  return {
    'id': service.name,
    'object': 'model',
    'created': service.created,
    'owned_by': 'swiftspec_jax',
    'max_model_len': service.engine.max_context,
    'speculation': {'max_tokens': service.engine.max_draft_tokens},
  }
