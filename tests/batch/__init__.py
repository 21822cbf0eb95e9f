"""Tests of the way back."""

import pytest

pytest.register_assert_rewrite("tests.batch.store_promises")  # before it is imported
