// SPDX-License-Identifier: Apache-2.0
// Renders templates with Go's text/template, as Ollama does: go run render.go < cases > texts
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type Message struct{ Role, Content string }
type Case struct {
	Template string
	System   string
	Messages []Message
}

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil {
		panic(err)
	}
	var texts []string
	for _, c := range cases {
		var out strings.Builder
		t := template.Must(template.New("").Parse(c.Template))
		values := map[string]any{"System": c.System, "Messages": c.Messages}
		if err := t.Execute(&out, values); err != nil {
			panic(err)
		}
		texts = append(texts, out.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
