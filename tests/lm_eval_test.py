"""The evaluation harness of EleutherAI against the server."""

import json

import pytest
import server_cases

import swiftspec_jax as ss
from swiftspec_jax import testing

CONTEXTS = [f'{word} is' for word in ('The sea', 'Rain', 'A tree', 'Caf\u00e9')]
TASKS = {
  'choose': {
    'output_type': 'multiple_choice',
    'doc_to_choice': '{{choices}}',
    'metric_list': [{'metric': 'acc'}, {'metric': 'acc_norm'}],
  },
  'continue': {
    'output_type': 'loglikelihood',
    'target_delimiter': '',
    'metric_list': [{'metric': 'perplexity'}, {'metric': 'acc'}],
  },
  'roll': {
    'output_type': 'loglikelihood_rolling',
    'doc_to_target': '{{context}}',
    'metric_list': [{'metric': 'byte_perplexity'}],
  },
}


def write_tasks(folder, model):
  """Tasks without a hub: files of questions, and what to do with them."""
  results = ss.generate(
    model, CONTEXTS, max_new_tokens=3, use_chat_template=False
  )
  rows = [
    {
      'context': context,
      'choices': ['blue', 'green', 'no\nline', '\u6f22\u5b57'],
      'answer': i,
      # What the model would say, where that is a text, and something else.
      'continuation': text,
    }
    for i, (context, result) in enumerate(zip(CONTEXTS, results, strict=True))
    for text in (result.text, ' wet')
    if text
  ]
  rows_of = {
    'choose': [{**row, 'target': row['answer']} for row in rows],
    'continue': [{**row, 'target': row['continuation']} for row in rows],
    'roll': rows,
  }
  for name, task in TASKS.items():
    file = folder / f'{name}.jsonl'
    file.write_text('\n'.join(map(json.dumps, rows_of[name])))
    settings = {
      'task': name,
      'dataset_path': 'json',
      'dataset_kwargs': {'data_files': {'test': str(file)}},
      'test_split': 'test',
      'doc_to_text': '' if name == 'roll' else '{{context}}',
      'doc_to_target': '{{target}}',
      **task,
    }
    (folder / f'{name}.yaml').write_text(json.dumps(settings))


@pytest.mark.peers
@pytest.mark.filterwarnings('ignore')
def test_results_equal_those_of_transformers(tmp_path, monkeypatch):
  for name in ('HF_HUB_OFFLINE', 'HF_DATASETS_OFFLINE'):
    monkeypatch.setenv(name, '1')
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  lm_eval = pytest.importorskip('lm_eval')
  from lm_eval.tasks import TaskManager

  directory = tmp_path / 'model'
  testing.write_tiny_checkpoint(directory)
  model = ss.load(directory)
  write_tasks(tmp_path, model)

  def evaluate(kind, **options):
    found = lm_eval.simple_evaluate(
      kind,
      model_args=options,
      tasks=list(TASKS),
      task_manager=TaskManager(
        include_path=str(tmp_path), include_defaults=False
      ),
      batch_size=4,
      bootstrap_iters=0,
    )
    answers = {
      name: [sample['filtered_resps'] for sample in samples]
      for name, samples in found['samples'].items()
    }
    return answers, found['results']

  service = server_cases.make_service(model=model, name=str(directory))
  with server_cases.serving(service) as address:
    answers, figures = evaluate(
      'local-completions',
      model=str(directory),
      base_url=f'{address}/v1/completions',
      max_length=512,
    )
  expected_answers, expected = evaluate(
    'hf', pretrained=str(directory), dtype='float32', device='cpu'
  )
  is_greedy = set()
  for name, samples in answers.items():
    for own, other in zip(samples, expected_answers[name], strict=True):
      for one, two in zip(own, other, strict=True):
        if name == 'roll':
          one, two = (one, None), (two, None)
        assert one[0] == pytest.approx(two[0], abs=1e-4)
        assert one[1] == two[1]
        is_greedy.add(one[1])
  assert is_greedy == {True, False, None}
  for name, values in figures.items():
    for metric, value in values.items():
      if isinstance(value, float):
        assert value == pytest.approx(expected[name][metric], rel=1e-4)
