"""`penstock[schemas]`: what the ingest holds events against. The extra `server` has the ingest itself."""

from penstock.api.json_schema import compile_schema


def main() -> None:
    validate = compile_schema({"type": "object", "required": ["id"]}, "orders.json")
    print(validate({"id": 1}), validate({}))


if __name__ == "__main__":
    main()
