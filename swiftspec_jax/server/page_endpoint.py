"""The page to chat with the model."""

import functools
import importlib.resources
import re

import fastapi
from fastapi import responses

_PAGE_FILES = importlib.resources.files(__package__).joinpath('page')
# The page asks this server alone, and shows what a model says as text.
_PAGE_HEADERS = {
  'Content-Security-Policy': (
    "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
  ),
  'Referrer-Policy': 'no-referrer',
  'X-Content-Type-Options': 'nosniff',
}

router = fastapi.APIRouter()


@router.get('/', response_class=responses.HTMLResponse, include_in_schema=False)
async def page():
  """Returns a page to chat with the model."""
  return responses.HTMLResponse(_whole_page(), headers=_PAGE_HEADERS)


@functools.cache
def _whole_page() -> str:
  """Returns the page with what it links to inside of it: one answer."""
  text = _PAGE_FILES.joinpath('page.html').read_text()
  for pattern, tag in (
    (r'<link rel="stylesheet" href="(.*)">', 'style'),
    (r'<script src="(.*)"></script>', 'script'),
  ):
    for link in re.finditer(pattern, text):
      own = _PAGE_FILES.joinpath(link[1]).read_text()
      text = text.replace(link[0], f'<{tag}>\n{own}</{tag}>')
  return text
